"""The compiled kernels as `torch.library` operators: each call is checked here before any pointer crosses.

The only file that imports `megarl._C`. Every operator has a fake form, so `torch.compile` passes through.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    from megarl import _C
except ImportError as error:
    raise ImportError(
        f"megarl's kernels are not built ({error}); run `pip install --no-build-isolation --no-deps -e .` "
        "in the repository"
    ) from error

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
HAS_CUDA: bool = _C.has_cuda


def check(
    name: str,
    tensor: Tensor,
    *,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
    contiguous: bool = True,
) -> None:
    """Raises ValueError, naming both sides, unless `tensor` is what a kernel may be handed."""
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


def check_rows(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless `tensor` is a matrix on a supported device whose rows are contiguous."""
    if tensor.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected two dimensions [tokens, vocabulary]")
    if tensor.dtype not in DTYPE_CODES:
        raise ValueError(f"{name} has dtype {tensor.dtype}, expected one of {', '.join(map(str, DTYPE_CODES))}")
    if tensor.device.type == "cuda" and tensor.dtype == torch.float64:
        raise ValueError(f"{name} has dtype torch.float64 on {tensor.device}; float64 is supported on CPU only")
    rows, columns = tensor.shape
    if columns > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name} has column stride {tensor.stride(1)}, expected 1; call .contiguous() first")
    if rows > 1 and tensor.stride(0) < columns:
        raise ValueError(f"{name} has row stride {tensor.stride(0)}, expected at least its {columns} columns")


def where(tensor: Tensor) -> _C.Where:
    """The device, stream and thread count that a kernel on `tensor` runs with."""
    if tensor.device.type == "cuda":
        if not HAS_CUDA:
            raise ValueError(f"tensors are on {tensor.device}, but megarl was built with MEGARL_CUDA=0; rebuild it")
        return _C.Where(True, torch.cuda.current_stream(tensor.device).cuda_stream, 0)
    if tensor.device.type != "cpu":
        raise ValueError(f"tensors are on {tensor.device}; megarl's kernels run on cpu and cuda")
    return _C.Where(False, 0, torch.get_num_threads())


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """What row statistics of logits of `dtype` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_row_inputs(logits: Tensor, labels: Tensor, inv_temp: Tensor, vocab_valid: int, vocab_start: int) -> None:
    check_rows("logits", logits)
    rows = logits.shape[0]
    check("labels", labels, dtype=torch.int64, shape=(rows,), device=logits.device)
    shape = (1,) if inv_temp.shape == (1,) else (rows,)
    check("inv_temp", inv_temp, dtype=stats_dtype(logits.dtype), shape=shape, device=logits.device)
    if vocab_valid < 1 or vocab_start < 0:
        raise ValueError(f"vocab_valid is {vocab_valid} and vocab_start {vocab_start}; expected >= 1 and >= 0")


def _shape(logits: Tensor, vocab_valid: int, vocab_start: int) -> _C.LogitRows:
    rows, columns = logits.shape
    valid = min(max(vocab_valid - vocab_start, 0), columns)
    return _C.LogitRows(rows, columns, valid, logits.stride(0), vocab_start, DTYPE_CODES[logits.dtype])


@torch.library.custom_op("megarl::logprob_stats", mutates_args=())
def logprob_stats(logits: Tensor, labels: Tensor, inv_temp: Tensor, vocab_valid: int, vocab_start: int) -> Tensor:
    """Row statistics `[rows, 4]` = (max, sum, dot, label logit) of csrc/common/row_math.h."""
    _check_row_inputs(logits, labels, inv_temp, vocab_valid, vocab_start)
    stats = torch.empty(logits.shape[0], 4, dtype=inv_temp.dtype, device=logits.device)
    shape = _shape(logits, vocab_valid, vocab_start)
    temp_stride = int(inv_temp.numel() > 1)
    _C.logprob_stats(
        where(logits), shape, logits.data_ptr(), labels.data_ptr(), inv_temp.data_ptr(), temp_stride, stats.data_ptr()
    )
    return stats


@logprob_stats.register_fake
def _(logits: Tensor, labels: Tensor, inv_temp: Tensor, vocab_valid: int, vocab_start: int) -> Tensor:
    return logits.new_empty((logits.shape[0], 4), dtype=inv_temp.dtype)


@torch.library.custom_op("megarl::logprob_merge", mutates_args=())
def logprob_merge(stats: Tensor, labels: Tensor, inv_temp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics `[ranks, rows, 4]` to log-prob `[rows]`, entropy `[rows]` and backward context `[rows, 3]`."""
    ranks, rows = stats.shape[:2]
    check("stats", stats, dtype=inv_temp.dtype, shape=(ranks, rows, 4), device=labels.device)
    check("labels", labels, dtype=torch.int64, shape=(rows,), device=stats.device)
    logprob, entropy = stats.new_empty(rows), stats.new_empty(rows)
    context = stats.new_empty(rows, 3)
    _C.logprob_merge(
        *(where(stats), ranks, rows, DTYPE_CODES[stats.dtype], stats.data_ptr(), labels.data_ptr()),
        *(inv_temp.data_ptr(), int(inv_temp.numel() > 1)),
        *(logprob.data_ptr(), entropy.data_ptr(), context.data_ptr()),
    )
    return logprob, entropy, context


@logprob_merge.register_fake
def _(stats: Tensor, labels: Tensor, inv_temp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = stats.shape[1]
    return stats.new_empty(rows), stats.new_empty(rows), stats.new_empty((rows, 3))


def _backward_into(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    inv_temp: Tensor,
    context: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    vocab_valid: int,
    vocab_start: int,
) -> None:
    _check_row_inputs(logits, labels, inv_temp, vocab_valid, vocab_start)
    rows = logits.shape[0]
    check("context", context, dtype=inv_temp.dtype, shape=(rows, 3), device=logits.device)
    check("grad_logprob", grad_logprob, dtype=inv_temp.dtype, shape=(rows,), device=logits.device)
    if grad_entropy is not None:
        check("grad_entropy", grad_entropy, dtype=inv_temp.dtype, shape=(rows,), device=logits.device)
    shape = _shape(logits, vocab_valid, vocab_start)
    _C.logprob_backward(
        *(where(logits), shape, logits.data_ptr(), grad.data_ptr(), grad.stride(0), labels.data_ptr()),
        *(inv_temp.data_ptr(), int(inv_temp.numel() > 1), context.data_ptr(), grad_logprob.data_ptr()),
        grad_entropy.data_ptr() if grad_entropy is not None else 0,
    )


@torch.library.custom_op("megarl::logprob_backward", mutates_args=())
def logprob_backward(
    logits: Tensor,
    labels: Tensor,
    inv_temp: Tensor,
    context: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    vocab_valid: int,
    vocab_start: int,
) -> Tensor:
    """Gradient of the logits, `[rows, columns]` in their dtype, in memory of its own."""
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _backward_into(grad, logits, labels, inv_temp, context, grad_logprob, grad_entropy, vocab_valid, vocab_start)
    return grad


@logprob_backward.register_fake
def _(
    logits: Tensor,
    labels: Tensor,
    inv_temp: Tensor,
    context: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    vocab_valid: int,
    vocab_start: int,
) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.custom_op("megarl::logprob_backward_", mutates_args=("logits",))
def logprob_backward_(
    logits: Tensor,
    labels: Tensor,
    inv_temp: Tensor,
    context: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    vocab_valid: int,
    vocab_start: int,
) -> None:
    """Overwrites the logits with their gradient: no second `[rows, columns]` buffer."""
    _backward_into(logits, logits, labels, inv_temp, context, grad_logprob, grad_entropy, vocab_valid, vocab_start)


@torch.library.custom_op("megarl::group_advantage", mutates_args=())
def group_advantage(
    rewards: Tensor, order: Tensor, sorted_ids: Tensor, mode: int, eps: float, normalize_columns: bool
) -> Tensor:
    """Group-relative advantages `[batch]` of rewards `[batch, columns]`; `order` sorts the batch by group."""
    batch, columns = rewards.shape
    check("rewards", rewards, dtype=torch.float32, shape=(batch, columns), device=rewards.device)
    check("order", order, dtype=torch.int64, shape=(batch,), device=rewards.device)
    check("sorted_ids", sorted_ids, dtype=torch.int64, shape=(batch,), device=rewards.device)
    advantage = rewards.new_empty(batch)
    _C.group_advantage(
        *(where(rewards), batch, columns, rewards.data_ptr(), order.data_ptr(), sorted_ids.data_ptr()),
        *(mode, eps, normalize_columns, advantage.data_ptr()),
    )
    return advantage


@group_advantage.register_fake
def _(rewards: Tensor, order: Tensor, sorted_ids: Tensor, mode: int, eps: float, normalize_columns: bool) -> Tensor:
    return rewards.new_empty(rewards.shape[0])
