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
