"""The emulator itself: collectives, indices and conversions as on a GPU, and every fault named."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from devices import FINITE, NAN, SCHEDULES, Schedule
from simt_build import ROOT, Kernels, linked, lock, rewrite

PROBE = "csrc/probe/cuda.cu"
Probe = Callable[[str, Schedule, int], tuple[np.ndarray, str]]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    kernels = Kernels(ROOT / "csrc", {PROBE: (Path(__file__).parent / "probe.cu").read_text()})
    with lock():
        library = ctypes.CDLL(str(linked([kernels.object_of(PROBE), kernels.object_of("simt.cpp")])))
    library.probe.restype = ctypes.c_char_p
    return library


@pytest.fixture
def probe(library: ctypes.CDLL) -> Probe:
    def run(name: str, schedule: Schedule = SCHEDULES[0], size: int = 64) -> tuple[np.ndarray, str]:
        out = np.full(size, -1, dtype=np.int32)
        error = library.probe(
            name.encode(), schedule.order, schedule.seed, schedule.poison, ctypes.c_void_p(out.ctypes.data)
        )
        return out, error.decode()

    return run


@pytest.mark.parametrize("schedule", [*SCHEDULES, *(Schedule(2, seed, FINITE) for seed in range(5))])
def test_shuffles_and_ballots_give_what_a_gpu_gives(probe, schedule):
    out, error = probe("collectives", schedule, 8 * 64)
    assert not error
    lane = np.arange(64) % 32
    segment = lane // 8 * 8
    columns = [
        np.full(64, 103),
        100 + np.where(lane < 2, lane, lane - 2),
        100 + np.where(lane + 5 > 31, lane, lane + 5),
        100 + (lane ^ 6),
        101 + segment,
        100 + np.where(lane % 8 < 3, lane, lane - 3),
        100 + np.where(lane % 8 + 3 > 7, lane, lane + 3),
        np.full(64, sum(1 << i for i in range(0, 32, 3)), dtype=np.uint32).view(np.int32),
    ]
    np.testing.assert_array_equal(out.reshape(64, 8), np.stack(columns, axis=1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_halves_of_a_warp_go_their_own_ways(probe, schedule):
    out, error = probe("halves", schedule, 32)
    assert not error
    ballot = np.array(0xAAAA0000, dtype=np.uint32).view(np.int32)
    assert out.tolist() == [int(ballot)] * 16 + [120] * 16


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_blocks_and_threads_have_three_dimensions(probe, schedule):
    out, error = probe("transpose", schedule, 12 * 128)
    assert not error
    i = np.arange(128)
    np.testing.assert_array_equal(out.reshape(12, 128), 1000 * np.arange(12)[:, None] + i % 4 * 32 + i // 4)


def test_a_lost_barrier_shows_in_the_order_of_threads(probe):
    results = {tuple(probe("lost_barrier", schedule)[0]) for schedule in SCHEDULES}
    assert len(results) > 1


def test_unwritten_shared_memory_shows_as_poison(probe):
    values = [probe("unwritten_shared", Schedule(0, 0, poison), 32)[0].view(np.float32) for poison in (NAN, FINITE)]
    assert np.flatnonzero(np.isnan(values[0])).tolist() == [9]
    assert np.flatnonzero(values[0] != values[1]).tolist() == [9]


def test_a_lane_outside_of_the_mask_gives_no_value(probe):
    assert probe("unnamed_source", SCHEDULES[0], 32)[0][:16].tolist() == [-1] * 16


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "ended_before_barrier",
            [", block (", "__syncthreads at csrc/probe/cuda.cu:", " has threads 0-39, 50; missing, ", ": 40-49, 51-63"],
        ),
        ("two_barriers", [" has threads 0-31; missing, because they wait for __syncthreads at ", ": 32-63"]),
        ("absent_lane", ["__shfl_down_sync at ", " has threads 0-4, 6-31; missing, because they ended: 5"]),
        ("wrong_mask", ["__ballot_sync at ", "a lane that its mask does not name", "thread (31, 0, 0)"]),
        ("past_shared", ["block (0, 0, 0): writes outside of the shared variable values"]),
        ("too_much_shared", ["more than 48 KiB of shared memory with values"]),
    ],
)
def test_a_fault_is_an_error_that_names_kernel_block_and_threads(probe, schedule, name, parts):
    _, error = probe(name, schedule)
    for part in [f"{name}(int*)", *parts]:
        assert part in error
    assert probe("halves", schedule, 32)[1] == ""  # the next launch works


def test_a_launch_of_too_many_threads_is_refused(probe):
    assert probe("too_many_threads")[1] == "invalid configuration argument"


def test_conversions_round_as_cuda_does_and_ex2_is_within_two_units(library):
    special = [
        0.0,
        -0.0,
        torch.inf,
        -torch.inf,
        torch.nan,
        65519.0,
        65520.0,
        6e-8,
        2.9e-8,
        1e-40,
        3.4e38,
        -126.5,
        128.0,
    ]
    x = torch.cat([torch.tensor(special), torch.linspace(-140, 140, 65536 - len(special))])
    out = torch.full((len(x), 4), torch.nan)
    library.probe_convert(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), len(x))
    for column, dtype in ((1, torch.float16), (2, torch.bfloat16)):
        torch.testing.assert_close(out[:, column], x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
    every_half = torch.arange(65536).to(torch.uint16).view(torch.float16).float()
    torch.testing.assert_close(out[:, 3], every_half, rtol=0, atol=0, equal_nan=True)
    want = torch.exp2(x.double())
    normal = (want >= 2.0**-126) & (want < 2.0**127)
    error = ((out[:, 0].double() - want).abs() / want)[normal]
    assert 2.0**-23 < error.max() <= 2.6 * 2.0**-23
    assert (out[want < 2.0**-126, 0] == 0).all()
    assert out[[2, 3, 4], 0].tolist()[:2] == [torch.inf, 0]
    assert out[4, 0].isnan()


def test_composed_gae_maps_equal_applying_both(library):
    maps = np.random.default_rng(0).normal(size=(400, 12))
    maps[:, [3, 8]] = np.arange(400)[:, None] // [1, 2] % 2  # sets_value of the earlier and the later map
    out = np.full((400, 4), np.nan)
    library.probe_compose(ctypes.c_void_p(maps.ctypes.data), ctypes.c_void_p(out.ctypes.data), 400)
    np.testing.assert_allclose(out[:, :2], out[:, 2:], rtol=1e-12, atol=1e-12)


def test_the_rewriter_keeps_lines_and_refuses_what_it_does_not_know():
    source = (
        "template <class T>\n__global__ void k(T* x,\n int n) {\n  __shared__ T s[2];\n}\nns::k<int><<<1, 2>>>(x);\n"
    )
    text = rewrite(source, "a.cu")
    assert text.count("\n") == source.count("\n") + 1
    assert "simt::launch(ns::k<int>, 1, 2)(x);" in text
    with pytest.raises(ValueError, match=r"a\.cu:2: the emulator does not know this form of __shared__"):
        rewrite("\nextern __shared__ float x[];", "a.cu")
