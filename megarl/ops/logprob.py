"""Log-probs and entropy of labels under packed, vocabulary-parallel logits, and their gradients.

Forward reads the logits once and keeps three floats per row. Backward reads them once more and can overwrite them with
their own gradient. csrc/common/row_math.h has the formulas. `linear_logprobs` starts from hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ops import logprob_kernels as kernels
from megarl.ops.first_derivative import first_derivative_only
from megarl.ops.linear_logprob import linear_logprobs, linear_token_loss
from megarl.ops.logprob_kernels import as_labels, inverse_temperature, row_results

__all__ = [
    "gather_logprobs",
    "gather_logprobs_entropy",
    "linear_logprobs",
    "linear_token_loss",
    "vocab_parallel_logprobs",
]


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_valid: int,
    vocab_start: int = 0,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes each row's log-prob of its label, and optionally the row's entropy, from a vocabulary shard.

    Args:
        logits: `[tokens, local vocabulary]`, bf16, fp16 or fp32 (fp64 on CPU), divided by `temperature` before the
            softmax. The row stride may exceed the row length.
        labels: i32 or i64 `[tokens]`, global vocabulary ids. Rows with label -1 have log-prob, entropy and gradient 0.
        vocab_valid: true size of the vocabulary; columns past it are padding with probability 0.
        vocab_start: global id of this shard's first column.
        temperature: a number between 1e-30 and 1e30, or one for each token `[tokens]`.
        group: ranks with the shards of the vocabulary, in vocabulary order. One all-gather of four floats per token.
        with_entropy: also return the entropy in nats.
        inplace_backward: backward overwrites `logits` with their gradient. Nothing else may read them by then, and
            backward can run only once.

    Returns:
        float32 `[tokens]` log-probs and entropy (or None); float64 for float64 logits. Both are differentiable.
        Each rank computes the complete gradient of its own shard, without a collective in backward.

    Raises:
        ValueError: a dtype, shape, stride, device, temperature or (on CPU) label out of range.
    """
    kernels.check_rows("logits", logits)
    if group is None and logits.shape[1] < 1:
        raise ValueError(f"logits have shape {tuple(logits.shape)}, expected at least one column of the vocabulary")
    labels = as_labels(labels, logits, vocab_valid)
    inv_temp = inverse_temperature(temperature, logits)
    logprob, entropy = _RowLogprobs.apply(
        logits, labels, inv_temp, vocab_valid, vocab_start, group, with_entropy, inplace_backward
    )
    return logprob, entropy if with_entropy else None


def gather_logprobs(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Computes log-probs of `labels` `[...]` under whole-vocabulary `logits` `[..., vocabulary]`.

    The result is float32 and differentiable. Row i scores `labels[i]`. To score the next
    token of packed ids, pass `torch.roll(input_ids, -1)`.
    """
    return _gather(logits, labels, temperature, with_entropy=False)[0]


def gather_logprobs_entropy(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Computes log-probs like `gather_logprobs`, and the entropy of each row in nats."""
    logprob, entropy = _gather(logits, labels, temperature, with_entropy=True)
    assert entropy is not None
    return logprob, entropy


def _gather(
    logits: Tensor, labels: Tensor, temperature: float | Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    if logits.ndim < 1 or logits.shape[:-1] != labels.shape or logits.shape[-1] < 1:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and labels {tuple(labels.shape)}; "
            "logits must have the labels' shape and then the vocabulary, of at least one entry"
        )
    vocab = logits.shape[-1]
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        try:
            temperature = temperature.expand(labels.shape).reshape(-1)
        except RuntimeError as error:
            raise ValueError(
                f"temperature has shape {tuple(temperature.shape)}, which does not expand to the labels' "
                f"{tuple(labels.shape)}; pass one number, or one for each label"
            ) from error
    logprob, entropy = vocab_parallel_logprobs(
        logits.reshape(labels.numel(), vocab),
        labels.reshape(-1),
        vocab_valid=vocab,
        temperature=temperature,
        with_entropy=with_entropy,
    )
    return logprob.view(labels.shape), entropy.view(labels.shape) if entropy is not None else None


class _RowLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        inv_temp: Tensor,
        vocab_valid: int,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
        inplace_backward: bool,
    ) -> tuple[Tensor, Tensor]:
        vocab = (vocab_valid, vocab_start)
        logprob, entropy, context = row_results(logits, labels, inv_temp, vocab, group, with_entropy)
        ctx.save_for_backward(logits, labels, inv_temp, context)
        ctx.vocab = vocab
        ctx.with_entropy = with_entropy
        ctx.inplace_backward = inplace_backward
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @first_derivative_only("vocab_parallel_logprobs", "megarl.ops.torch_twins.vocab_parallel_logprobs")
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        logits, labels, inv_temp, context = ctx.saved_tensors
        h = grad_entropy.contiguous() if ctx.with_entropy else None
        arguments = (logits, labels, inv_temp, context, grad_logprob.contiguous(), h, *ctx.vocab)
        if ctx.inplace_backward:
            kernels.logprob_backward_(*arguments)
            return logits, *(None,) * 7
        return kernels.logprob_backward(*arguments), *(None,) * 7
