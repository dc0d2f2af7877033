"""Rows of a chunk of the LM head: rates of GPUs, expected times, and bounds of the choice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megarl.ops.head_chunks import ChunkCost, GpuSpeed, cpu_chunk_rows, gpu_chunk_rows

# Capability, SMs, clock and memory clock in MHz, bus width in bits; and the data sheet's rates.
GPUS = {
    "A100": ((8, 0), 108, 1410, 1593, 5120, 312e12, 2.039e12),
    "H100": ((9, 0), 132, 1830, 2619, 5120, 989e12, 3.35e12),
    "H200": ((9, 0), 132, 1830, 3201, 6144, 989e12, 4.8e12),
    "B200": ((10, 0), 148, 1850, 3996, 8192, 2250e12, 8.0e12),
    "L40S": ((8, 9), 142, 2520, 9001, 384, 362e12, 0.864e12),
}
H100 = GpuSpeed(989e12, 3.35e12, 132)
GIB = 1 << 30


@pytest.mark.parametrize("name", GPUS)
def test_device_properties_give_the_rates_of_the_data_sheets(name: str) -> None:
    (major, minor), sms, clock, memory_clock, bus, flops, bandwidth = GPUS[name]
    properties = SimpleNamespace(
        major=major, minor=minor, multi_processor_count=sms, clock_rate=clock * 1000,
        memory_clock_rate=memory_clock * 1000, memory_bus_width=bus,
    )  # fmt: skip
    speed = GpuSpeed.of(properties)
    assert speed.flops == pytest.approx(flops, rel=0.03)
    assert speed.bandwidth == pytest.approx(bandwidth, rel=0.03)
    assert speed.sms == sms


def cost(speed: GpuSpeed = H100, vocab: int = 151936, grad_bytes: int = 2) -> ChunkCost:
    return ChunkCost(4096, vocab, speed, logit_bytes=2, grad_bytes=grad_bytes)


def test_operations_and_bytes_are_counted() -> None:
    """10 rows, 3 hidden, 7 columns, by hand."""
    small = ChunkCost(3, 7, H100, logit_bytes=4, grad_bytes=4)
    products = small.products(10)
    assert {flops for flops, _, _ in products.values()} == {2 * 10 * 3 * 7}
    assert [size for _, size, _ in products.values()] == [
        2 * 21 + 2 * 30 + 4 * 70,
        2 * 21 + 2 * 30 + 2 * 70,
        2 * 4 * 21 + 2 * 30 + 2 * 70,
    ]
    assert small.row_bytes(10) == 70 * (3 * 4 + 4 + 2)
    assert ChunkCost(3, 7, H100, logit_bytes=2, grad_bytes=2).row_bytes(10) == 70 * 6


def test_a_chunk_of_liger_kernels_size_costs_what_was_measured() -> None:
    """512 rows with bfloat16 sums, as Liger-Kernel has them, took 1.15x all logits at once on an H100."""
    whole = cost().seconds(16384)
    assert cost().all_seconds(16384, 512) / whole == pytest.approx(1.15, abs=0.03)
    assert cost(grad_bytes=4).all_seconds(16384, 1024) > 1.05 * whole
    assert cost().all_seconds(16384, gpu_chunk_rows(16384, cost(), 80 * GIB)) < 1.03 * whole


@pytest.mark.parametrize("grad_bytes", [2, 4])
@pytest.mark.parametrize("total", [16384, 65536, 10**6])
@pytest.mark.parametrize("name", GPUS)
def test_a_chunk_takes_at_most_a_tenth_of_the_logits_and_of_the_expected_time(
    name: str, total: int, grad_bytes: int
) -> None:
    *_, flops, bandwidth = GPUS[name]
    chosen = cost(GpuSpeed(flops, bandwidth, GPUS[name][1]), grad_bytes=grad_bytes)
    rows = gpu_chunk_rows(total, chosen, 80 * GIB)
    assert rows <= 0.1 * total
    assert rows % 128 == 0
    bound = 1.16 if name == "L40S" else 1.1  # the least bandwidth for its operations
    assert chosen.all_seconds(total, rows) <= bound * chosen.seconds(total)


def test_few_rows_are_one_chunk_and_small_memory_bounds_it() -> None:
    assert [gpu_chunk_rows(n, cost(), 80 * GIB) for n in (0, 1, 700, 1024)] == [1, 1, 700, 1024]
    assert gpu_chunk_rows(1025, cost(), 80 * GIB) <= 1024
    row = 2 * 151936
    assert gpu_chunk_rows(10**6, cost(), 32 * 256 * row) <= 256
    assert gpu_chunk_rows(10**6, cost(), 1) == 128
    assert gpu_chunk_rows(5000, cost(vocab=0), 80 * GIB) >= 1  # a rank without a part of the vocabulary


def test_the_choice_on_the_cpu_stays_as_it_was() -> None:
    sizes = (0, 1, 256, 4096, 4097, 16384, 16385, 10**6)
    assert [cpu_chunk_rows(n) for n in sizes] == [256, 256, 256, 256, 257, 1024, 1024, 1024]
