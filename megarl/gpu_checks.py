"""Rules against this machine's GPUs: its driver, what torch sees of them, and the code of megarl's own kernels."""

from __future__ import annotations

import torch

from megarl import versions
from megarl.knobs import UserError
from megarl.parallel import hardware_queues, platform


def check_driver() -> None:
    """Refuses a driver older than torch's CUDA toolkit. With it, torch would find no GPU and run on the CPU."""
    built, driver = torch.version.cuda, versions.driver_cuda()
    if built is None or driver is None or driver[0] >= int(built.partition(".")[0]):
        return
    raise UserError(
        f"the NVIDIA driver {versions.gpus().driver or ''} runs CUDA {driver[0]}.{driver[1]} and older, and torch "
        f"{torch.__version__} is built for CUDA {built}; install a driver for CUDA {built.partition('.')[0]} or newer"
    )


def check_gpus_seen(planned: int) -> None:
    """Refuses a run on `planned` GPUs a machine where the driver has GPUs and torch cannot use them.

    It would go on by the CPU: as the only machine in silence, and beside others until they have waited too long.
    """
    if not planned or platform.has_gpu() or hardware_queues.lowest_major() is None:
        return
    reason = "torch.cuda.is_available() is False"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter of a build without CUDA
        reason = str(error).partition("\n")[0]
    raise UserError(
        f"cluster.gpus_per_node={planned}, and torch {torch.__version__} cannot use this machine's GPUs: {reason}; "
        "python -m megarl.doctor says what is missing, and cluster.gpus_per_node=0 runs without GPUs"
    )


def check_kernels() -> None:
    """Refuses GPUs that `megarl._C` has no code for."""
    if not platform.has_gpu():
        return
    from megarl.ops import native

    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    for index, (major, minor) in enumerate(capabilities):
        if not native.runs_on((major, minor)):
            built = ", ".join(native.CUDA_ARCHITECTURES) or "none: it was built with MEGARL_CUDA=0"
            raise UserError(
                f"GPU {index} ({torch.cuda.get_device_name(index)}) has compute capability {major}.{minor}, and "
                f"megarl._C is built for {built}; rebuild it: CUDAARCHS={major}{minor} MEGARL_CUDA=1 "
                "pip install --no-build-isolation --no-deps --editable ."
            )
