"""The compiled module `_C`, and the checks before every pointer passed to it."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import megarl._C as _C
except ImportError as error:
    raise ImportError(
        f"megarl's kernels are not built ({error}); run `pip install --no-build-isolation --no-deps -e .` "
        "in the repository"
    ) from error

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
HAS_CUDA: bool = _C.has_cuda
CUDA_ARCHITECTURES: tuple[str, ...] = tuple(_C.cuda_architectures.split(",")) if HAS_CUDA else ()
CPU = torch.device("cpu")


def check(
    name: str,
    tensor: Tensor,
    *,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
    contiguous: bool = True,
) -> None:
    """Checks that a kernel can take `tensor`.

    Raises:
        ValueError: with the actual and the expected value.
    """
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in allowed:
        names = " or ".join(str(d) for d in allowed)
        raise ValueError(f"{name} has dtype {tensor.dtype}, this kernel takes {names}; convert it first")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape} to match the other arguments")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other arguments are on {device}; move it first")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, it must be contiguous; call .contiguous() first")


def check_on_cpu(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    contiguous: bool = True,
) -> None:
    """Checks a tensor of a CPU-only kernel; see `check`."""
    check(name, tensor, dtype=dtype, shape=shape, device=CPU, contiguous=contiguous)


def address(tensor: Tensor | None) -> int:
    """Returns the address of a tensor's data, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def where(tensor: Tensor) -> _C.Where:
    """Returns the device, stream and number of threads that a kernel on `tensor` runs with."""
    if tensor.device.type == "cuda":
        if not HAS_CUDA:
            raise ValueError(f"tensors are on {tensor.device}, but megarl was built with MEGARL_CUDA=0; rebuild it")
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
        return _C.Where(True, stream, 0, tensor.device.index)
    if tensor.device.type != "cpu":
        raise ValueError(f"tensors are on {tensor.device}; megarl's kernels run on cpu and cuda")
    return _C.Where(False, 0, torch.get_num_threads())


def runs_on(capability: tuple[int, int]) -> bool:
    """True if the CUDA kernels have code for GPUs of a compute capability, such as (9, 0)."""
    return any(_covers(architecture, capability) for architecture in CUDA_ARCHITECTURES)


def _covers(architecture: str, capability: tuple[int, int]) -> bool:
    """Compares one of CMake's architectures with a GPU.

    Machine code (`80-real`) runs on its own major version from its minor version on, PTX (`80-virtual`) on every later
    GPU; `80` is both. Code of the suffix `a` runs on its own GPU alone, code of `f` on its own major version.
    """
    name, _, form = architecture.partition("-")
    number = name.rstrip("af")
    major, minor = int(number[:-1]), int(number[-1])
    if name.endswith("a"):
        return capability == (major, minor)
    if form == "real" or name.endswith("f"):
        return capability[0] == major and capability[1] >= minor
    return capability >= (major, minor)
