"""Log-probs directly from hidden states and the LM head's weight, with only a chunk of the logits in memory.

A token-level loss allows the gradient to be computed while the chunk's logits are in memory: 6 T*H*V operations in
all. Otherwise backward computes the logits again: 8 T*H*V operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from megarl.ops import logprob_kernels as kernels
from megarl.ops.first_derivative import first_derivative_only
from megarl.ops.head_chunks import ChunkCost, GpuSpeed, cpu_chunk_rows, gpu_chunk_rows
from megarl.ops.logprob_kernels import as_labels, inverse_temperature, row_results
from megarl.ops.native import check, values_checked
from megarl.ops.skipped_columns import kept_columns

# Takes log-probs `[rows]`, entropy `[rows]` or None, and the rows' positions. Returns their losses, which are summed.
TokenLossFn = Callable[[Tensor, Tensor | None, Tensor], Tensor]


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_valid: int,
    vocab_start: int = 0,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    rows: Tensor | None = None,
    chunk_rows: int | None = None,
    main_grad: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    weight_grad_dtype: torch.dtype | None = None,
    skipped: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Computes log-probs of `labels` under `hidden @ weight.T`, without a `[tokens, vocabulary]` tensor.

    Only rows with a label are computed, a chunk at a time. Backward computes each chunk's logits again: 8 T*H*V
    operations in all instead of 6. `linear_token_loss` avoids this if each token's loss needs only that token's
    log-prob and entropy. Autocast changes no dtype. `vocab_parallel_logprobs` describes the arguments that are not
    listed here.

    Args:
        hidden: `[tokens, hidden]`, identical on all ranks of `group`; its gradient is summed over them.
        weight: `[local vocabulary, hidden]`, this rank's rows of the LM head, in hidden's dtype.
        rows: int64, the positions with a label, if the caller knows them. None finds them here, which on CUDA waits
            for the device.
        chunk_rows: rows of logits in memory at a time. None chooses by the GPU's speed and memory (`head_chunks`). On
            the CPU it is a sixteenth of the rows, between 256 and 1024.
        logits_dtype: dtype of the logits, at least hidden's; None is hidden's. Sums are float32 in any case.
        main_grad: float32 `[local vocabulary, hidden]`. Backward adds the weight's gradient to it, in float32
            throughout, and leaves `weight.grad` unchanged. None returns the gradient through autograd.
        weight_grad_dtype: dtype in which chunks of the weight's gradient are summed without `main_grad`, weight's or
            float32. None is float32 on the CPU, and on a GPU weight's: a float32 sum of a 16-bit weight takes twice
            the weight's memory. Each chunk then rounds the sum once more.
        skipped: share of each row's gradient (its 2-norm) that backward may leave out; see `skipped_columns`. With 0
            all is computed.

    Returns:
        float32 `[tokens]` log-probs and entropy (or None), 0 for rows without a label. Both are differentiable.
    """
    vocab, dtype = (vocab_valid, vocab_start), logits_dtype or hidden.dtype
    sums = _weight_sums(weight, main_grad, weight_grad_dtype)
    head = _Head.make(hidden, weight, labels, vocab, temperature, group, rows, chunk_rows, sums, dtype, skipped)
    logprob, entropy = _LinearLogprobs.apply(hidden, weight, head, with_entropy)
    return logprob, entropy if with_entropy else None


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_fn: TokenLossFn,
    *,
    vocab_valid: int,
    vocab_start: int = 0,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    rows: Tensor | None = None,
    chunk_rows: int | None = None,
    main_grad: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    weight_grad_dtype: torch.dtype | None = None,
    skipped: float = 0.0,
    loss_grad: float | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes a token-level loss directly from the hidden states, and each chunk's gradient with it.

    `loss_fn(logprobs, entropy, rows)` is called once per chunk, with the values and positions of the chunk's rows. It
    returns their losses, which are summed. See `linear_logprobs` for the other arguments.

    Args:
        loss_grad: gradient of the loss with which backward will be called, if it is known. Forward then adds the
            weight's gradient to `main_grad` and needs no buffer for it, and backward multiplies nothing.

    Returns:
        The summed loss, differentiable in `hidden` and `weight`; backward can run only once. Log-probs and entropy
        `[tokens]`, detached.
    """
    vocab, dtype = (vocab_valid, vocab_start), logits_dtype or hidden.dtype
    sums = _weight_sums(weight, main_grad, weight_grad_dtype)
    head = _Head.make(hidden, weight, labels, vocab, temperature, group, rows, chunk_rows, sums, dtype, skipped)
    if not torch.is_grad_enabled():  # an autograd function cannot see that gradients are off
        hidden, weight, loss_grad = hidden.detach(), weight.detach(), None
    loss, logprob, entropy = _LinearTokenLoss.apply(hidden, weight, head, with_entropy, loss_fn, loss_grad)
    return loss, logprob, entropy if with_entropy else None


class _WeightSums(NamedTuple):
    """Place of the weight's gradient: the main gradient, or None and the dtype of a buffer."""

    main_grad: Tensor | None
    dtype: torch.dtype


def _weight_sums(weight: Tensor, main_grad: Tensor | None, dtype: torch.dtype | None) -> _WeightSums:
    """Checks where the weight's gradient is to be summed."""
    if main_grad is not None:
        if dtype is not None:
            raise ValueError(f"weight_grad_dtype={dtype} with main_grad, whose sums are float32; leave one of them out")
        check("main_grad", main_grad, dtype=torch.float32, shape=tuple(weight.shape), device=weight.device)
        return _WeightSums(main_grad, torch.float32)
    wide = kernels.stats_dtype(weight.dtype)
    if dtype is None:
        dtype = weight.dtype if weight.device.type == "cuda" else wide
    if dtype not in (weight.dtype, wide):
        allowed = " or ".join(dict.fromkeys((str(weight.dtype), str(wide))))
        raise ValueError(f"weight_grad_dtype is {dtype}, expected {allowed}, for a {weight.dtype} weight")
    return _WeightSums(None, dtype)


@dataclass
class _Head:
    """Inputs shared by all chunks."""

    labels: Tensor
    inv_temp: Tensor
    rows: Tensor
    chunk: int
    vocab: tuple[int, int]  # vocab_valid, vocab_start
    group: dist.ProcessGroup | None
    sums: _WeightSums
    logits_dtype: torch.dtype
    skipped: float

    @staticmethod
    def make(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab: tuple[int, int],
        temperature: float | Tensor,
        group: dist.ProcessGroup | None,
        rows: Tensor | None,
        chunk_rows: int | None,
        sums: _WeightSums,
        logits_dtype: torch.dtype,
        skipped: float,
    ) -> _Head:
        kernels.check_rows("hidden", hidden)
        weight_shape = (weight.shape[:1].numel(), hidden.shape[1])
        check("weight", weight, dtype=hidden.dtype, shape=weight_shape, device=hidden.device)
        if group is None and weight.shape[0] < 1:
            raise ValueError(f"weight has shape {tuple(weight.shape)}, expected at least one row of the vocabulary")
        labels = as_labels(labels, hidden, vocab[0])
        rows = _labelled_rows(labels) if rows is None else _check_rows(rows, labels)
        if chunk_rows is not None and chunk_rows < 1:
            raise ValueError(f"chunk_rows is {chunk_rows}, it must be at least 1; None chooses")
        if not 0 <= skipped < 1:
            raise ValueError(f"skipped is {skipped}, a share of the gradient; it must be at least 0 and below 1")
        chunk = chunk_rows or _rows_of_chunk(rows.numel(), weight, logits_dtype.itemsize, sums.dtype.itemsize)
        inv_temp = inverse_temperature(temperature, hidden)
        return _Head(labels, inv_temp, rows, chunk, vocab, group, sums, logits_dtype, skipped)

    def chunks(self) -> list[tuple[slice, Tensor]]:
        """Splits the labelled rows into chunks: the slice of `rows`, and the token positions in it."""
        count = self.rows.numel()
        spans = [slice(i, min(i + self.chunk, count)) for i in range(0, count, self.chunk)]
        return [(span, self.rows[span]) for span in spans]

    def buffer(self, weight: Tensor) -> Tensor:
        """Memory for the logits of a chunk.

        Raises:
            torch.OutOfMemoryError: in one line, with the size of a chunk.
        """
        shape = min(self.chunk, self.rows.numel()), weight.shape[0]
        try:
            return torch.empty(shape, dtype=self.logits_dtype, device=weight.device)
        except torch.OutOfMemoryError as error:
            size = shape[0] * shape[1] * self.logits_dtype.itemsize / 2**20
            raise torch.OutOfMemoryError(
                f"a chunk of {shape[0]:,} x {shape[1]:,} logits takes {size:,.0f} MiB, more than {weight.device} has "
                "free; pass fewer chunk_rows, or keep less on the GPU"
            ) from error

    def row_inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        inv_temp = self.inv_temp if self.inv_temp.numel() == 1 else self.inv_temp[rows]
        return self.labels[rows], inv_temp

    def forward_chunk(self, logits: Tensor, rows: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        labels, inv_temp = self.row_inputs(rows)
        return row_results(logits, labels, inv_temp, self.vocab, self.group, with_entropy)

    def backward_chunk(
        self, logits: Tensor, rows: Tensor, context: Tensor, g: Tensor, h: Tensor | None, x: Tensor, grads: _HeadGrads
    ) -> None:
        """Overwrites the chunk's logits with their gradient, and adds to the gradients of `hidden` and `weight`."""
        labels, inv_temp = self.row_inputs(rows)
        h = h.contiguous() if h is not None else None
        kernels.logprob_backward_(logits, labels, inv_temp, context, g.contiguous(), h, *self.vocab)
        columns = kept_columns(logits, self.skipped, self.group) if self.skipped else None
        logits = logits.to(x.dtype)  # the products below take one dtype
        weight = grads.head_weight
        if columns is not None:
            logits, weight = logits.index_select(1, columns), weight.index_select(0, columns)
        if grads.hidden is not None:
            grads.hidden.index_copy_(0, rows, torch.mm(logits, weight, out=torch.empty_like(x)))
        if grads.weight is not None:
            grads.add_weight(logits, x, columns)

    def finish(self, grads: _HeadGrads) -> None:
        if grads.hidden is not None and self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(grads.hidden, group=self.group)


def _rows_of_chunk(total: int, weight: Tensor, logit_bytes: int, grad_bytes: int) -> int:
    """Chooses the rows of a chunk for the device of `weight`."""
    if weight.device.type != "cuda":
        return cpu_chunk_rows(total)
    properties = torch.cuda.get_device_properties(weight.device)
    vocab, hidden = weight.shape
    cost = ChunkCost(hidden, vocab, GpuSpeed.of(properties), logit_bytes, grad_bytes)
    return gpu_chunk_rows(total, cost, properties.total_memory)


def _check_rows(rows: Tensor, labels: Tensor) -> Tensor:
    check("rows", rows, dtype=torch.int64, shape=(rows.numel(),), device=labels.device)
    if values_checked(rows) and not torch.equal(rows.sort().values, _labelled_rows(labels)):
        raise ValueError(
            f"rows name {rows.numel()} positions, which are not those of the {int((labels != -1).sum())} labels, each "
            "once; leave rows out, or pass all positions with a label"
        )
    return rows


def _labelled_rows(labels: Tensor) -> Tensor:
    """Returns the positions with a label; of fake labels, which have no values, all positions."""
    if is_fake(labels):
        return torch.arange(labels.numel(), device=labels.device)
    return (labels != -1).nonzero().squeeze(1)


@dataclass
class _HeadGrads:
    """Gradients of `hidden` and `weight`, accumulated over chunks; None if not needed."""

    head_weight: Tensor  # the weight itself, to which hidden's gradient is linear
    hidden: Tensor | None
    weight: Tensor | None
    unwritten: bool = False  # the weight's gradient has no values yet: the first chunk's are written, not added

    @staticmethod
    def make(hidden: Tensor, weight: Tensor, needed: tuple[bool, ...], sums: _WeightSums, rows: Tensor) -> _HeadGrads:
        for_hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if needed[0] else None
        if sums.main_grad is not None:
            return _HeadGrads(weight, for_hidden, sums.main_grad)
        if not needed[1]:
            return _HeadGrads(weight, for_hidden, None)
        unwritten = weight.device.type == "cuda" and rows.numel() > 0
        new = torch.empty_like if unwritten else torch.zeros_like
        return _HeadGrads(weight, for_hidden, new(weight, dtype=sums.dtype), unwritten)

    def add_weight(self, d_logits: Tensor, hidden: Tensor, columns: Tensor | None) -> None:
        """Adds a chunk to the weight's gradient, or to its rows `columns`."""
        assert self.weight is not None
        if columns is not None:
            if self.unwritten:
                self.weight.zero_()
            of_columns = self.weight.new_empty(columns.numel(), self.weight.shape[1])
            self.weight.index_add_(0, columns, product(d_logits.t(), hidden.t(), of_columns))
        elif self.unwritten:
            product(d_logits.t(), hidden.t(), self.weight)
        else:
            add_weight_grad(self.weight, d_logits, hidden)
        self.unwritten = False


def product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Computes `x @ weight.T` into `out`, whose dtype may be wider: it is rounded once, from the float32 sums.

    As with all products here, an output that is given keeps autocast from changing the dtype.
    """
    if out.dtype == x.dtype:
        return torch.mm(x, weight.t(), out=out)
    if x.device.type == "cuda":
        return torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    return torch.mm(x.to(out.dtype), weight.t().to(out.dtype), out=out)


class WideProduct(torch.autograd.Function):
    """`x @ weight.T` in a wider dtype than its factors', whose gradients are products in the factors' dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, x.new_empty(x.shape[0], weight.shape[0], dtype=dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        for_x, for_weight = ctx.needs_input_grad[:2]
        with torch.autocast(x.device.type, enabled=False):
            return grad @ weight if for_x else None, grad.t() @ x if for_weight else None, None


def add_weight_grad(grad: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """Computes `grad += d_logits.T @ hidden`, summed in `grad`'s dtype even if the factors are 16-bit."""
    if d_logits.dtype == grad.dtype:
        grad.addmm_(d_logits.t(), hidden)
    elif grad.device.type == "cuda":
        torch.addmm(grad, d_logits.t(), hidden, out_dtype=grad.dtype, out=grad)
    else:
        x = hidden.to(grad.dtype)
        for start in range(0, grad.shape[0], 4096):  # blocks of the vocabulary bound the size of the widened copy
            block = slice(start, start + 4096)
            grad[block].addmm_(d_logits[:, block].to(grad.dtype).t(), x)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: _Head, with_entropy: bool) -> tuple[Tensor, Tensor]:
        logprob = torch.zeros(hidden.shape[0], dtype=kernels.stats_dtype(hidden.dtype), device=hidden.device)
        entropy = torch.zeros_like(logprob)
        context = logprob.new_empty(head.rows.numel(), 3)
        buffer = head.buffer(weight)
        for span, rows in head.chunks():
            logits = product(hidden.index_select(0, rows), weight, buffer[: rows.numel()])
            logprob[rows], entropy[rows], context[span] = head.forward_chunk(logits, rows, with_entropy)
        ctx.save_for_backward(hidden, weight, context)
        ctx.head, ctx.with_entropy = head, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @first_derivative_only("linear_logprobs", "megarl.ops.torch_twins.linear_logprobs")
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        hidden, weight, context = ctx.saved_tensors
        head: _Head = ctx.head
        grads = _HeadGrads.make(hidden, weight, ctx.needs_input_grad, head.sums, head.rows)
        buffer = head.buffer(weight)
        for span, rows in head.chunks():
            x = hidden.index_select(0, rows)
            logits = product(x, weight, buffer[: rows.numel()])
            h = grad_entropy[rows] if ctx.with_entropy else None
            head.backward_chunk(logits, rows, context[span], grad_logprob[rows], h, x, grads)
        head.finish(grads)
        returned = grads.weight.to(weight.dtype) if grads.weight is not None and head.sums.main_grad is None else None
        return grads.hidden, returned, None, None


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        head: _Head,
        with_entropy: bool,
        loss_fn: TokenLossFn,
        loss_grad: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprob = torch.zeros(hidden.shape[0], dtype=kernels.stats_dtype(hidden.dtype), device=hidden.device)
        entropy, total = torch.zeros_like(logprob), logprob.new_zeros(())
        # Without `loss_grad` the main gradient waits for backward, which knows the factor.
        sums = head.sums if loss_grad is not None else head.sums._replace(main_grad=None)
        grads = _HeadGrads.make(hidden, weight, ctx.needs_input_grad, sums, head.rows)
        seed = None if loss_grad is None else torch.full_like(total, loss_grad)
        buffer = head.buffer(weight)
        for _, rows in head.chunks():
            x = hidden.index_select(0, rows)
            logits = product(x, weight, buffer[: rows.numel()])
            chunk_logprob, chunk_entropy, context = head.forward_chunk(logits, rows, with_entropy)
            logprob[rows], entropy[rows] = chunk_logprob, chunk_entropy
            leaves = [chunk_logprob.requires_grad_()]
            if with_entropy:
                leaves.append(chunk_entropy.requires_grad_())
            with torch.enable_grad():
                loss = loss_fn(chunk_logprob, chunk_entropy if with_entropy else None, rows).sum()
            total += loss.detach()
            g, *h = torch.autograd.grad(
                loss,
                leaves,
                seed.to(loss.dtype) if seed is not None else None,
                allow_unused=True,
                materialize_grads=True,
            )
            head.backward_chunk(logits, rows, context, g, h[0] if h else None, x, grads)
        head.finish(grads)
        ctx.save_for_backward(grads.hidden, grads.weight if sums.main_grad is None else None)
        ctx.main_grad, ctx.weight_dtype, ctx.loss_grad = head.sums.main_grad, weight.dtype, loss_grad
        ctx.mark_non_differentiable(logprob, entropy)
        return total, logprob, entropy

    @staticmethod
    @first_derivative_only("linear_token_loss", "megarl.ops.torch_twins.linear_logprobs")
    def backward(ctx: Any, grad_loss: Tensor, *unused: Any) -> tuple[Any, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        if ctx.loss_grad is not None:
            _check_loss_grad(grad_loss, ctx.loss_grad)
        else:
            if hidden_grad is not None:
                hidden_grad.mul_(grad_loss.to(hidden_grad.dtype))
            if weight_grad is not None and ctx.main_grad is not None:
                ctx.main_grad.addcmul_(weight_grad, grad_loss.to(weight_grad.dtype))
                weight_grad = None
            elif weight_grad is not None:
                weight_grad.mul_(grad_loss)
        weight_grad = weight_grad.to(ctx.weight_dtype) if weight_grad is not None else None
        return hidden_grad, weight_grad, None, None, None, None


def _check_loss_grad(actual: Tensor, told: float) -> None:
    """Refuses a gradient that differs from `loss_grad`. On a GPU the kernel stops, so the host needs no wait."""
    expected = torch.full_like(actual, told)
    if values_checked(actual) and not torch.equal(actual, expected):
        raise ValueError(f"backward got a loss gradient of {float(actual):g} after loss_grad={told:g}; pass the same")
    if actual.device.type == "cuda" and not is_fake(actual):
        torch._assert_async(actual == expected, f"backward got another loss gradient than loss_grad={told:g}")
