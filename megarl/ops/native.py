"""The compiled module `_C`, and the checks before every pointer passed to it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

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
_values_checked = {"cpu"}  # device types


def check_values_on_gpu() -> None:
    """Has every later call check the values of its CUDA tensors too: cu_seqlens, labels and temperatures.

    Each check waits for the GPU, so it is for finding a fault. `actor.debug_kernels` turns it on.
    """
    _values_checked.add("cuda")


def values_checked(tensor: Tensor) -> bool:
    """True if the values of `tensor` are to be checked. Traced and fake tensors have none."""
    return not torch.compiler.is_compiling() and tensor.device.type in _values_checked and not is_fake(tensor)


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


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int, device: torch.device) -> None:
    """Checks the bounds of packed sequences: int32 `[num_seqs + 1]`, rising from 0 to `tokens`.

    Raises:
        ValueError: with the first bound that does not fit.
    """
    check("cu_seqlens", cu_seqlens, dtype=torch.int32, shape=(max(cu_seqlens.numel(), 1),), device=device)
    if not values_checked(cu_seqlens):
        return
    falls = cu_seqlens[1:] < cu_seqlens[:-1]
    if not bool(falls.any() | (cu_seqlens[0] != 0) | (cu_seqlens[-1] != tokens)):
        return
    if begin := int(cu_seqlens[0]):
        raise ValueError(f"cu_seqlens begins at {begin}; it must rise from 0 to the {tokens} tokens")
    if bool(falls.any()):
        at = int(falls.int().argmax())
        before, after = cu_seqlens[at : at + 2].tolist()
        raise ValueError(
            f"cu_seqlens falls from {before} to {after} in sequence {at}; it must rise from 0 to the {tokens} tokens"
        )
    raise ValueError(f"cu_seqlens ends at {int(cu_seqlens[-1])}, but there are {tokens} tokens; it must end there")


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
