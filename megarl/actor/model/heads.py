"""Heads: from final hidden states to logits, log-probs or values.

The model stops before its head, and callers compute only the output that they need. Log-probs of many tokens are
computed from one chunk of logits at a time, so the full `[tokens, vocabulary]` is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.actor.batch.context_parallel import LocalTokens
from megarl.actor.batch.microbatch import Labels
from megarl.actor.config import KEPT_LOGITS_ON_CPU_MB, EngineConfig
from megarl.ops import row_invariant
from megarl.ops.divergence import FullTeacher, Student, TopKTeacher, linear_divergence
from megarl.ops.head_chunks import KEPT_SHARE_OF_MEMORY
from megarl.ops.known_gradients import TokenGradients, logprobs_of_token_loss
from megarl.ops.linear_logprob import WideProduct
from megarl.ops.logprob import linear_logprobs, vocab_parallel_logprobs
from megarl.parallel import determinism
from megarl.parallel.groups import Groups

KEPT_SHARE_OF_FREE = 1 / 4


class HeadlessGPT(GPTModel):
    """Megatron's model up to its final norm. The last stage returns hidden states `[tokens, 1, hidden]`.

    The module still has `output_layer`, with its own weight or the tied embedding's. The functions below apply it.
    """

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # gpt_model.py:620
        return hidden_states


class ValueHead(torch.nn.Linear):
    """Value head with one output per token. Its weight `[1, hidden]` is replicated on every tensor parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)


def scale_embeddings(embedding: torch.nn.Module, scale: float) -> None:
    """Multiplies the module's output by `scale`, rounded to the dtype of its weight as transformers does (Gemma)."""
    if scale == 1.0:
        return
    rounded = torch.tensor(scale, dtype=next(embedding.parameters()).dtype).item()
    embedding.register_forward_hook(lambda _, __, output: output * rounded)


def weight_of(module: GPTModel) -> Tensor:
    """Rows of the LM head (or tied embedding) on this rank, `[vocabulary / tp, hidden]`."""
    if module.share_embeddings_and_output_weights:
        return module.shared_embedding_or_output_weight()
    return module.output_layer.weight


class _Readying(torch.autograd.Function):
    """Identity of hidden states. Backward calls `ready`, after the product behind them has added its gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ready: Callable[[], None]) -> Tensor:
        ctx.ready = ready
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.ready()
        return grad, None


def _readying(hidden: Tensor, weight: Tensor) -> Tensor:
    """Marks the hidden states of a product that adds the gradient of `weight` itself, without autograd.

    The backward hook of Megatron's DDP does not run for such a weight. So with overlapped reduction the weight has
    `grad_ready` (`data_parallel.py`), to be called once in each backward pass.
    """
    ready = getattr(weight, "grad_ready", None)
    if ready is None or not torch.is_grad_enabled():
        return hidden
    marked: Tensor = _Readying.apply(hidden, ready)
    return marked


def no_loss(output: Tensor, module: GPTModel) -> Tensor:
    """Computes a loss of 0 that reaches every parameter, for a microbatch without weight."""
    return _readying(output, weight_of(module)).sum() * 0.0


def hidden_states(output: Tensor, module: GPTModel, groups: Groups, shared: LocalTokens | None = None) -> Tensor:
    """Gathers the hidden states `[tokens, hidden]` of this cp rank's tokens, on every tp rank.

    Every consumer gives each tp rank the full gradient. So backward only slices out the rank's own tokens, without a
    sum over tp.
    """
    if module.config.sequence_parallel:
        output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False, group=groups.tp)
    hidden = output.squeeze(1)
    return hidden if shared is None else hidden.index_select(0, shared.rows)


def logits(hidden: Tensor, module: GPTModel, groups: Groups, vocab_size: int) -> Tensor:
    """Computes logits `[tokens, vocabulary]`: gathered over tp, without padding of the vocabulary."""
    local = _local_logits(hidden, weight_of(module), groups, hidden.dtype)
    if groups.tp_size > 1:
        local = gather_from_tensor_model_parallel_region(local, group=groups.tp)
    return local[:, :vocab_size]


class KeptLogits:
    """Limit on the bytes of logits kept for backward, by `actor.kept_logits_mb`.

    On a GPU the default follows the memory that is free, with what torch's allocator holds unused. CUDA is asked once a
    pass, behind the layers of its first microbatch, whose activations are in memory then.
    Ranks that share the vocabulary must decide alike, as keeping and chunking take different collectives. They go by
    the GPU's total memory instead.
    """

    def __init__(self, megabytes: int, tp_size: int) -> None:
        self._megabytes, self._tp_size = megabytes, tp_size
        self._bytes: int | None = None

    def begin(self) -> None:
        """Begins a pass."""
        self._bytes = None

    def holds(self, size: int, device: torch.device) -> bool:
        """True if logits of `size` bytes are kept."""
        if self._bytes is None:
            self._bytes = self._most(device)
        return size <= self._bytes

    def _most(self, device: torch.device) -> int:
        if self._megabytes >= 0 or device.type != "cuda":
            return (self._megabytes if self._megabytes >= 0 else KEPT_LOGITS_ON_CPU_MB) * 2**20
        if self._tp_size > 1 or determinism.entered():  # keeping and chunking round differently
            return int(torch.cuda.get_device_properties(device).total_memory * KEPT_SHARE_OF_MEMORY)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((torch.cuda.mem_get_info(device)[0] + unused) * KEPT_SHARE_OF_FREE)


@dataclass(frozen=True)
class HeadSettings:
    """Settings of an engine's head, for log-probs from hidden states."""

    temperature: float  # divides the logits
    float32: bool  # logits in float32; False: in the hidden states' dtype
    kept: KeptLogits
    skipped: float  # share of a token's gradient that products of chunks may leave out

    @staticmethod
    def of(config: EngineConfig, tp_size: int) -> HeadSettings:
        kept = KeptLogits(config.kept_logits_mb, tp_size)
        return HeadSettings(config.temperature, config.float32_head, kept, config.skipped_gradient)

    def dtype(self, hidden: Tensor) -> torch.dtype:
        """Dtype of the logits."""
        return torch.float32 if self.float32 else hidden.dtype


def logprobs(
    hidden: Tensor,
    labels: Labels,
    weight: Tensor,
    groups: Groups,
    vocab_size: int,
    settings: HeadSettings,
    with_entropy: bool,
    gradients: TokenGradients | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes log-probs of `labels` and entropies, float32 `[tokens]`, 0 where there is no label.

    `weight` is the rank's rows of the head (see `weight_of`); a detached one gets no gradient. Only rows with a label
    are computed. Logits are kept for backward if they fit into `settings.kept`: 6 * rows * V * H operations in total.
    Otherwise they are computed one chunk at a time, and the weight's gradient is added directly to the main gradient.
    With the loss's `gradients` this also costs 6, and the work of backward is done at once. Without them backward
    computes the logits again, for 8 * rows * V * H operations.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    ids, rows, logits_dtype = labels.ids, labels.rows, settings.dtype(hidden)
    options: dict[str, Any] = {
        "vocab_valid": vocab_size,
        "vocab_start": groups.tp_rank * weight.shape[0],
        "temperature": settings.temperature,
        "group": groups.tp if groups.tp_size > 1 else None,
    }
    trains = torch.is_grad_enabled()
    if trains and settings.kept.holds(rows.numel() * weight.shape[0] * logits_dtype.itemsize, weight.device):
        local_logits = _local_logits(hidden.index_select(0, rows), weight, groups, logits_dtype)
        row_results = vocab_parallel_logprobs(
            local_logits, ids[rows], with_entropy=with_entropy, inplace_backward=True, **options
        )
        return _spread(row_results, labels)
    inputs = _readying(hidden, weight), weight if main_grad is None else weight.detach(), ids
    options |= {"rows": rows, "main_grad": main_grad, "logits_dtype": logits_dtype, "skipped": settings.skipped}
    if trains and gradients is not None:
        return logprobs_of_token_loss(*inputs, gradients, with_entropy=with_entropy, **options)
    return linear_logprobs(*inputs, with_entropy=with_entropy, **options)


def divergence(
    hidden: Tensor,
    labels: Labels,
    module: GPTModel,
    groups: Groups,
    vocab_size: int,
    temperature: float,
    logits_dtype: torch.dtype,
    teacher: FullTeacher | TopKTeacher,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes log-probs of `labels`, entropies and divergences from a teacher, float32 `[tokens]`, 0 without a label.

    Logits are in memory one chunk at a time, in forward and again in backward. Backward adds the weight's gradient
    directly to the main gradient, as `logprobs` does.
    """
    weight = weight_of(module)
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    student = Student(
        labels.ids,
        labels.rows,
        vocab_size,
        groups.tp_rank * weight.shape[0],
        groups.tp if groups.tp_size > 1 else None,
        logits_dtype,
        main_grad,
    )
    weight_in = weight if main_grad is None else weight.detach()
    return linear_divergence(_readying(hidden, weight), weight_in, student, teacher, beta=beta, temperature=temperature)


def row_invariant_logprobs(
    hidden: Tensor,
    labels: Labels,
    weight: Tensor,
    groups: Groups,
    vocab_size: int,
    settings: HeadSettings,
    with_entropy: bool,
    gradients: TokenGradients | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`logprobs` by the rollout server's functions, of float32 models. Keeps all logits, gathered over tp."""
    rows = hidden.index_select(0, labels.rows)
    if groups.tp_size > 1:
        rows = copy_to_tensor_model_parallel_region(rows, group=groups.tp)
    logits = row_invariant.linear(rows, weight)
    if groups.tp_size > 1:
        logits = gather_from_tensor_model_parallel_region(logits, group=groups.tp)
    ids = labels.ids[labels.rows]
    return _spread(row_invariant.logprobs(logits, ids, settings.temperature, vocab_size, with_entropy), labels)


def _spread(row_results: tuple[Tensor, Tensor | None], labels: Labels) -> tuple[Tensor, Tensor | None]:
    """Scatters log-probs and entropies of the rows with a label to all tokens; 0 elsewhere."""
    zeros = row_results[0].new_zeros(labels.ids.shape)
    logprob, entropy = (zeros.index_put((labels.rows,), x) if x is not None else None for x in row_results)
    assert logprob is not None
    return logprob, entropy


def _local_logits(hidden: Tensor, weight: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Computes this rank's logits `[tokens, vocabulary / tp]` in `dtype`."""
    if groups.tp_size > 1:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=groups.tp)
    if dtype == hidden.dtype:
        return hidden @ weight.t()
    logits: Tensor = WideProduct.apply(hidden, weight, dtype)
    return logits


def values(hidden: Tensor, module: GPTModel) -> Tensor:
    """Computes the value head's output at each position, float32 `[tokens]`."""
    return module.output_layer(hidden).squeeze(1).float()
