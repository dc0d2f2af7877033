"""The log-prob kernels as `torch.library` operators, with checks, and fake implementations for `torch.compile`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ops.native import _C, DTYPE_CODES, check, values_checked, where

TEMPERATURES = (1e-30, 1e30)  # lowest and highest: a temperature and its reciprocal must be float32 numbers
TEMPERATURE_RULE = "must be a positive number between {:g} and {:g}; use greedy decoding for 0".format(*TEMPERATURES)


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


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of row statistics for logits of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_labels(labels: Tensor, logits: Tensor, vocab_valid: int) -> Tensor:
    """Checks the labels `[rows]` and their range (see `values_checked`), and converts them to contiguous int64."""
    if vocab_valid < 1:
        raise ValueError(f"the vocabulary has {vocab_valid} entries, it must have at least 1")
    rows = logits.shape[:1]
    check("labels", labels, dtype=(torch.int64, torch.int32), shape=tuple(rows), device=logits.device, contiguous=False)
    if labels.numel() and values_checked(labels):
        low, high = (int(v) for v in labels.aminmax())
        if low < -1 or high >= vocab_valid:
            raise ValueError(
                f"labels lie in [{low}, {high}], the vocabulary has {vocab_valid} entries; "
                "use -1 where a row has no label"
            )
    return labels.to(torch.int64).contiguous()


def inverse(temperature: float) -> float:
    """Returns `1 / temperature`."""
    if not TEMPERATURES[0] <= temperature <= TEMPERATURES[1]:
        raise ValueError(f"temperature is {temperature}, it {TEMPERATURE_RULE}")
    return 1.0 / temperature


def inverse_temperature(temperature: float | Tensor, logits: Tensor) -> Tensor:
    """Returns `1 / temperature` as float64 `[1]` or `[tokens]`."""
    if not isinstance(temperature, Tensor):
        return torch.full((1,), inverse(temperature), dtype=torch.float64, device=logits.device)
    dtypes = (*DTYPE_CODES, torch.int64, torch.int32)
    if temperature.dtype not in dtypes:
        raise ValueError(f"temperature has dtype {temperature.dtype}, expected one of {', '.join(map(str, dtypes))}")
    if temperature.numel() and values_checked(temperature):
        lowest, highest = (float(v) for v in temperature.detach().aminmax())
        if not TEMPERATURES[0] <= lowest <= highest <= TEMPERATURES[1]:
            raise ValueError(f"temperatures lie in [{lowest}, {highest}], each {TEMPERATURE_RULE}")
    value = temperature.detach().double().reciprocal()
    return value.reshape(1) if value.numel() == 1 else value.contiguous()


def row_results(
    logits: Tensor,
    labels: Tensor,
    inv_temp: Tensor,
    vocab: tuple[int, int],
    group: dist.ProcessGroup | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes log-prob, entropy and context of each row. Ranks of `group` exchange their statistics."""
    size = dist.get_world_size(group) if group is not None else 1
    if size == 1:
        return logprob_rows(logits, labels, inv_temp, *vocab, with_entropy)
    stats = logprob_stats(logits, labels, inv_temp, *vocab, with_entropy)
    stats_by_rank = stats.new_empty(size, *stats.shape)
    dist.all_gather(list(stats_by_rank.unbind(0)), stats, group=group)
    return logprob_merge(stats_by_rank, labels, inv_temp)


def _check_row_inputs(logits: Tensor, labels: Tensor, inv_temp: Tensor, vocab_valid: int, vocab_start: int) -> None:
    check_rows("logits", logits)
    rows = logits.shape[0]
    check("labels", labels, dtype=torch.int64, shape=(rows,), device=logits.device)
    shape = (1,) if inv_temp.shape == (1,) else (rows,)
    check("inv_temp", inv_temp, dtype=torch.float64, shape=shape, device=logits.device)
    if vocab_valid < 1 or vocab_start < 0:
        raise ValueError(f"vocab_valid is {vocab_valid} and vocab_start {vocab_start}; expected >= 1 and >= 0")


def _shape(logits: Tensor, vocab_valid: int, vocab_start: int) -> _C.LogitRows:
    rows, columns = logits.shape
    valid = min(max(vocab_valid - vocab_start, 0), columns)
    return _C.LogitRows(rows, columns, valid, logits.stride(0), vocab_start, DTYPE_CODES[logits.dtype])


@torch.library.custom_op("megarl::logprob_stats", mutates_args=())
def logprob_stats(
    logits: Tensor, labels: Tensor, inv_temp: Tensor, vocab_valid: int, vocab_start: int, with_entropy: bool
) -> Tensor:
    """Computes `[rows, 4]` = (max, sum, dot, label logit) of csrc/common/row_math.h; dot is 0 unless `with_entropy`."""
    _check_row_inputs(logits, labels, inv_temp, vocab_valid, vocab_start)
    stats = torch.empty(logits.shape[0], 4, dtype=stats_dtype(logits.dtype), device=logits.device)
    shape = _shape(logits, vocab_valid, vocab_start)
    _C.logprob_stats(
        *(where(logits), shape, logits.data_ptr(), labels.data_ptr(), inv_temp.data_ptr(), int(inv_temp.numel() > 1)),
        *(with_entropy, stats.data_ptr()),
    )
    return stats


@logprob_stats.register_fake
def _(
    logits: Tensor, labels: Tensor, inv_temp: Tensor, vocab_valid: int, vocab_start: int, with_entropy: bool
) -> Tensor:
    return logits.new_empty((logits.shape[0], 4), dtype=stats_dtype(logits.dtype))


@torch.library.custom_op("megarl::logprob_rows", mutates_args=())
def logprob_rows(
    logits: Tensor, labels: Tensor, inv_temp: Tensor, vocab_valid: int, vocab_start: int, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `logprob_merge` of `logprob_stats` in one launch, of rows whose whole vocabulary is on this rank."""
    _check_row_inputs(logits, labels, inv_temp, vocab_valid, vocab_start)
    rows = logits.shape[0]
    stats = torch.empty(rows, 4, dtype=stats_dtype(logits.dtype), device=logits.device)
    logprob, entropy, context = stats.new_empty(rows), stats.new_empty(rows), stats.new_empty(rows, 3)
    shape = _shape(logits, vocab_valid, vocab_start)
    _C.logprob_rows(
        *(where(logits), shape, logits.data_ptr(), labels.data_ptr(), inv_temp.data_ptr(), int(inv_temp.numel() > 1)),
        *(with_entropy, stats.data_ptr(), logprob.data_ptr(), entropy.data_ptr(), context.data_ptr()),
    )
    return logprob, entropy, context


@logprob_rows.register_fake
def _(
    logits: Tensor, labels: Tensor, inv_temp: Tensor, vocab_valid: int, vocab_start: int, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, dtype = logits.shape[0], stats_dtype(logits.dtype)
    logprob, entropy = logits.new_empty(rows, dtype=dtype), logits.new_empty(rows, dtype=dtype)
    return logprob, entropy, logits.new_empty((rows, 3), dtype=dtype)


@torch.library.custom_op("megarl::logprob_merge", mutates_args=())
def logprob_merge(stats: Tensor, labels: Tensor, inv_temp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merges statistics `[ranks, rows, 4]` into log-prob `[rows]`, entropy `[rows]` and context `[rows, 3]`."""
    ranks, rows = stats.shape[:2]
    check("stats", stats, dtype=(torch.float32, torch.float64), shape=(ranks, rows, 4), device=labels.device)
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
    dtype = stats_dtype(logits.dtype)
    check("context", context, dtype=dtype, shape=(rows, 3), device=logits.device)
    check("grad_logprob", grad_logprob, dtype=dtype, shape=(rows,), device=logits.device)
    if grad_entropy is not None:
        check("grad_entropy", grad_entropy, dtype=dtype, shape=(rows,), device=logits.device)
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
    """Returns the gradient of the logits, `[rows, columns]`, in their dtype and in new memory."""
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
    """Overwrites the logits with their gradient, without a second `[rows, columns]` buffer."""
    _backward_into(logits, logits, labels, inv_temp, context, grad_logprob, grad_entropy, vocab_valid, vocab_start)
