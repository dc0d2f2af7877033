"""Refusals of this machine's driver and kernels, before a run starts anything.

Planted: the driver's CUDA version, torch's, and the GPUs. The driver's library itself is a small one compiled here.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from megarl import checks, cli, doctor, versions
from megarl.knobs import UserError, run_all
from megarl.ops import native
from megarl.parallel import hardware_queues, platform
from megarl.trainer.inputs import read_inputs

SHIPPED = ("80-real", "90a-real", "100-real", "100-virtual")  # CMakeLists.txt's


def machine(
    patch: pytest.MonkeyPatch, *, driver: tuple[int, int] | None, toolkit: str | None, gpus: list[tuple[int, int]]
) -> None:
    patch.setattr(versions, "driver_cuda", lambda: driver)
    patch.setattr(versions, "gpus", lambda: versions.GPUs(("NVIDIA H100",), (81559,), "550.54.15"))
    patch.setattr(torch.version, "cuda", toolkit)
    patch.setattr(platform, "has_gpu", lambda: bool(gpus))
    patch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    patch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index])
    patch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU of {gpus[index]}")


def refusals() -> list[str]:
    return checks.failures(checks.machine_checks(cli.composed(["+experiment=gsm8k_sft"])))


@pytest.mark.parametrize("driver", [None, (13, 0), (13, 2), (14, 0)])
def test_a_driver_of_the_toolkits_major_version_or_newer_is_accepted(
    driver: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, driver=driver, toolkit="13.0", gpus=[])
    assert refusals() == []


def test_a_driver_without_a_cuda_build_of_torch_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, driver=(11, 4), toolkit=None, gpus=[])
    assert refusals() == []


@pytest.mark.parametrize(
    ("planned", "major", "refused"), [(8, 9, True), (8, None, False), (0, 9, False)], ids=["planned", "no GPU", "CPU"]
)
def test_gpus_that_torch_cannot_use_are_refused_where_the_run_is_planned_for_them(
    planned: int, major: int | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's environment on a GPU machine, or a fabric manager that is down."""
    machine(monkeypatch, driver=None, toolkit=None, gpus=[])
    monkeypatch.setattr(hardware_queues, "lowest_major", lambda: major)

    def fails() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "init", fails)
    config = cli.composed(["+experiment=gsm8k_sft", f"cluster.gpus_per_node={planned}"])
    found = checks.failures(checks.machine_checks(config))
    assert len(found) == refused
    if refused:
        assert found[0].startswith(f"cluster.gpus_per_node=8, and torch {torch.__version__} cannot use this machine's")
        assert "Torch not compiled with CUDA enabled" in found[0]


def test_a_head_node_without_gpus_may_start_ranks_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's head node often has none. Each rank makes the checks on its own machine."""
    monkeypatch.delenv("RANK", raising=False)
    knobs = ["+experiment=gsm8k_sft", "launcher=ray", "actor.backend=te", "actor.dtype=bfloat16"]
    assert checks.failures(checks.machine_checks(cli.composed(knobs))) == []
    monkeypatch.setenv("RANK", "0")
    assert any("a GPU" in text for text in checks.failures(checks.machine_checks(cli.composed(knobs))))


def test_a_driver_older_than_the_toolkit_is_refused_before_the_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, driver=(12, 4), toolkit="13.0", gpus=[])
    with pytest.raises(UserError) as caught:  # the model's folder does not exist, which comes second
        read_inputs(cli.composed(["+experiment=gsm8k_sft", "actor.path=/nonexistent"]), rank=0)
    message = str(caught.value)
    assert message.startswith("the NVIDIA driver 550.54.15 runs CUDA 12.4 and older, and torch ")
    assert message.endswith("is built for CUDA 13.0; install a driver for CUDA 13 or newer")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("built", "accepted", "refused"),
    [
        (SHIPPED, [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)], [(7, 0), (7, 5)]),
        (("80-real",), [(8, 0), (8, 9)], [(7, 5), (9, 0), (12, 0)]),
        (("86-real",), [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        (("90a-real",), [(9, 0)], [(8, 0), (10, 0)]),
        (("100f-real",), [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        (("80-virtual",), [(8, 0), (9, 0), (12, 0)], [(7, 5)]),
        (("90",), [(9, 0), (12, 0)], [(8, 9)]),
        ((), [], [(9, 0)]),
    ],
)
def test_kernels_run_on_the_gpus_that_their_code_is_for(
    built: tuple[str, ...],
    accepted: list[tuple[int, int]],
    refused: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "CUDA_ARCHITECTURES", built)
    assert [gpu for gpu in accepted if not native.runs_on(gpu)] == []
    assert [gpu for gpu in refused if native.runs_on(gpu)] == []


def test_kernels_for_other_gpus_are_refused_with_the_command_that_rebuilds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, driver=(13, 0), toolkit="13.0", gpus=[(9, 0), (12, 0)])
    monkeypatch.setattr(native, "CUDA_ARCHITECTURES", ("80-real", "90a-real"))
    with pytest.raises(UserError) as caught:
        run_all(checks.machine_checks(cli.composed(["+experiment=gsm8k_sft"])))
    assert str(caught.value) == (
        "GPU 1 (GPU of (12, 0)) has compute capability 12.0, and megarl._C is built for 80-real, 90a-real; rebuild it: "
        "CUDAARCHS=120 MEGARL_CUDA=1 pip install --no-build-isolation --no-deps --editable ."
    )
    monkeypatch.setattr(native, "CUDA_ARCHITECTURES", SHIPPED)
    assert refusals() == []
    monkeypatch.setattr(native, "CUDA_ARCHITECTURES", ())
    assert any("built for none: it was built with MEGARL_CUDA=0" in text for text in refusals())


def test_the_build_records_its_architectures() -> None:
    assert bool(native.CUDA_ARCHITECTURES) == native.HAS_CUDA
    for architecture in native.CUDA_ARCHITECTURES:
        number, _, form = architecture.partition("-")
        assert number.rstrip("af").isdigit()
        assert form in ("", "real", "virtual")


@pytest.mark.parametrize(("body", "version"), [("*v = 13020; return 0;", (13, 2)), ("*v = 0; return 34;", None)])
def test_the_drivers_library_is_asked_for_its_version(
    body: str, version: tuple[int, int] | None, tmp_path: Path
) -> None:
    library = tmp_path / "libcuda.so.1"
    source = f'extern "C" int cuDriverGetVersion(int* v) {{ {body} }}'
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True, timeout=900)
    assert versions.driver_cuda(str(library)) == version


def test_a_machine_without_a_driver_has_no_version(tmp_path: Path) -> None:
    assert versions.driver_cuda(str(tmp_path / "libcuda.so.1")) is None


def test_the_doctor_reports_both(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine(monkeypatch, driver=(12, 4), toolkit="13.0", gpus=[(7, 5)])
    monkeypatch.setattr(doctor, "driver_cuda", lambda: (12, 4))
    monkeypatch.setattr(doctor, "gpus", versions.gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(native, "CUDA_ARCHITECTURES", SHIPPED)
    assert doctor.command() == 1
    text = capsys.readouterr().out
    assert "MISSING  driver: " in text
    assert "MISSING  CUDA kernels: megarl._C on these GPUs" in text


@pytest.mark.parametrize(
    ("library", "found"), [("libibverbs.so.1", None), ("libc.so.6", "mlx5_0, mlx5_1")], ids=["missing", "present"]
)
def test_the_doctor_names_cards_that_nccl_can_use(
    library: str, found: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without its library NCCL goes over TCP and says nothing."""
    for card in ("mlx5_1", "mlx5_0"):
        (tmp_path / card).mkdir()
    load = ctypes.CDLL
    monkeypatch.setattr(doctor, "CARDS", tmp_path)
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: load(library if found else "libno-such-library.so"))
    assert doctor._network() == found
