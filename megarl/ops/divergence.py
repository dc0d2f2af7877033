"""Divergence of a student's next-token distribution from its teacher's, with a chunk of both logits in memory.

    beta = 0        KL(teacher || student), forward
    0 < beta < 1    beta KL(teacher || M) + (1 - beta) KL(student || M),    M = beta teacher + (1 - beta) student
    beta = 1        KL(student || teacher), reverse

The middle is GKD's generalised Jensen-Shannon divergence (Agarwal et al., https://arxiv.org/abs/2306.13649, section 2).
Logits are computed from hidden states, some rows at a time, and again in backward. Every rank of a tensor parallel
group has its columns of both. Ranks exchange only a few sums per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ops.first_derivative import first_derivative_only
from megarl.ops.gather import gather_rows
from megarl.ops.head_chunks import divergence_chunk_rows
from megarl.ops.linear_logprob import add_weight_grad, product
from megarl.ops.logprob_kernels import inverse, stats_dtype

LEAST_REST = 1e-7  # floor of a teacher's probability outside its top k: the spacing of float32 below 1
NO_LOGIT = -1e4  # logit of a token outside the student's vocabulary
LEAST_LOG_REST = -30.0  # floor of a student's log-prob outside the top k


@dataclass(frozen=True)
class FullTeacher:
    """A teacher's hidden states of the trained rows, and its LM head cut as the student's.

    Logits of the first `vocab_valid` tokens are compared: the tokens that both models have. Both distributions are
    normalised over them.
    """

    hidden: Tensor  # [rows, teacher's hidden size]
    weight: Tensor  # [local vocabulary, teacher's hidden size]
    vocab_valid: int


@dataclass(frozen=True)
class TopKTeacher:
    """A teacher's most likely tokens of the trained rows. The other tokens count as one event, the rest.

    Tokens past the student's vocabulary count to the rest too.
    """

    ids: Tensor  # int64 [rows, k], distinct in each row
    logprobs: Tensor  # float32 [rows, k]


@dataclass(frozen=True)
class Student:
    """A student's LM head, and the tokens that it is trained on."""

    labels: Tensor  # int64 [tokens], read at `rows`
    rows: Tensor  # int64 [rows]: positions with a label
    vocab_valid: int  # size of the vocabulary; columns past it are padding
    vocab_start: int  # id of this rank's first column
    group: dist.ProcessGroup | None  # ranks that share the vocabulary
    logits_dtype: torch.dtype
    main_grad: Tensor | None  # float32 [local vocabulary, hidden], to which backward adds; None: autograd's


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    student: Student,
    teacher: FullTeacher | TopKTeacher,
    *,
    beta: float,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes log-probs of the labels, entropies, and divergences from the teacher.

    Args:
        hidden: `[tokens, hidden]`, identical on all ranks of the group; its gradient is summed over them.
        weight: `[local vocabulary, hidden]`, this rank's rows of the LM head.
        student: the labels and the vocabulary.
        teacher: its distribution at the rows with a label, in their order.
        beta: kind of the divergence, from 0 (forward KL) to 1 (reverse KL).
        temperature: divides the logits of the student and of a `FullTeacher`.
        chunk_rows: rows of logits in memory at a time; None takes `divergence_chunk_rows`.

    Returns:
        float32 `[tokens]` each (float64 for float64 states), 0 for rows without a label. All are differentiable in
        `hidden` and `weight`.

    Raises:
        ValueError: beta outside 0 to 1, or a teacher with another number of rows.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}, it must lie between 0 (forward KL) and 1 (reverse KL)")
    count = teacher.hidden.shape[0] if isinstance(teacher, FullTeacher) else teacher.ids.shape[0]
    if count != student.rows.numel():
        raise ValueError(f"the teacher has {count} rows and the student {student.rows.numel()}; pass the same tokens")
    chunk = chunk_rows or divergence_chunk_rows(weight.shape[0], on_gpu=hidden.is_cuda)
    head = _TwoHeads(student, teacher, beta, inverse(temperature), chunk)
    logprob, entropy, divergence = _LinearDivergence.apply(hidden, weight, head)
    return logprob, entropy, divergence


def top_k_logprobs(
    logits: Tensor, k: int, *, vocab_valid: int, vocab_start: int, group: dist.ProcessGroup | None, below: int = 2**62
) -> tuple[Tensor, Tensor]:
    """Finds the k most likely tokens of vocabulary-parallel logits `[rows, local vocabulary]`, with ids below `below`.

    Returns:
        ids, int64 `[rows, k]`, and log-probs over the whole vocabulary, float32 `[rows, k]`, equal on every rank.
    """
    columns = _columns(vocab_valid, vocab_start, logits.shape[1])
    z = logits[:, :columns].to(stats_dtype(logits.dtype))
    candidates = z[:, : _columns(below, vocab_start, columns)]
    best, ids = candidates.topk(min(k, candidates.shape[1]), dim=1)
    missing = k - best.shape[1]
    best = torch.nn.functional.pad(best, (0, missing), value=-math.inf)
    ids = torch.nn.functional.pad(ids + vocab_start, (0, missing))
    total = torch.logsumexp(_gathered(torch.logsumexp(z, 1), group), 0)
    all_best, all_ids = (_gathered(x, group).movedim(0, 1).flatten(1) for x in (best, ids))
    chosen, places = all_best.topk(k, dim=1)
    return all_ids.gather(1, places), chosen - total.unsqueeze(1)


@dataclass(frozen=True)
class _TwoHeads:
    """Inputs shared by all chunks."""

    student: Student
    teacher: FullTeacher | TopKTeacher
    beta: float
    inv_temp: float
    chunk: int

    def chunks(self) -> list[slice]:
        count = self.student.rows.numel()
        return [slice(i, min(i + self.chunk, count)) for i in range(0, count, self.chunk)]

    def scores(self, hidden: Tensor, weight: Tensor, vocab_valid: int) -> Tensor:
        """Tempered logits of this rank's valid columns, `[rows, columns]`."""
        out = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=self.student.logits_dtype)
        logits = product(hidden, weight, out)[:, : _columns(vocab_valid, self.student.vocab_start, weight.shape[0])]
        return logits.to(stats_dtype(hidden.dtype)) * self.inv_temp

    def chunk_of(self, span: slice, x: Tensor, weight: Tensor) -> _FullChunk | _TopKChunk:
        """Logits and sums of the rows in `span`. A collective of the group."""
        z = self.scores(x, weight, self.student.vocab_valid)
        labels = self.student.labels[self.student.rows[span]]
        if isinstance(self.teacher, FullTeacher):
            common = min(self.teacher.vocab_valid, self.student.vocab_valid)
            y = self.scores(self.teacher.hidden[span], self.teacher.weight, common)
            return _FullChunk(z, labels, y, self)
        return _TopKChunk(z, labels, self.teacher.ids[span], self.teacher.logprobs[span], self)


class _Chunk:
    """Log-probs of a chunk, and gradients of log-prob and entropy, which need no teacher.

    Logits and all that is made of them are the most memory of a distillation's update, so each lives as briefly as
    it can: `head_chunks.divergence_bytes` counts them.
    """

    def __init__(self, z: Tensor, total: Tensor, labels: Tensor, head: _TwoHeads) -> None:
        """Normalises this rank's logits `z` `[rows, columns]`, in place, by `total` `[rows]`, log-sums of all ranks."""
        self.head = head
        self.place = labels - head.student.vocab_start
        self.here = (self.place >= 0) & (self.place < z.shape[1])
        self.logq = z.sub_(total.unsqueeze(1))
        self.q = self.logq.exp()

    def label_logprob(self) -> Tensor:
        """This rank's share of the labels' log-probs: 0 where another rank has the label."""
        return _taken(self.logq, self.place, self.here)

    def negative_entropy(self) -> Tensor:
        return (self.q * self.logq).sum(1)

    def add_gradients(self, grad: Tensor, g: Tensor, h: Tensor, entropy: Tensor) -> Tensor:
        """Adds the gradient of `g` times the log-prob and `h` times the entropy to `grad`, in place."""
        grad.sub_(self.q * (g.unsqueeze(1) + h.unsqueeze(1) * (self.logq + entropy.unsqueeze(1))))
        index = self.place.clamp(0, max(0, grad.shape[1] - 1)).unsqueeze(1)
        return grad.scatter_add_(1, index, (g * self.here).unsqueeze(1)) if grad.shape[1] else grad


class _FullChunk(_Chunk):
    """A chunk with the teacher's logits `y` `[rows, common columns]`."""

    def __init__(self, z: Tensor, labels: Tensor, y: Tensor, head: _TwoHeads) -> None:
        common = y.shape[1]
        local = [torch.logsumexp(part, 1) for part in (z[:, :common], z[:, common:], y)]
        sums = torch.logsumexp(_gathered(torch.stack(local, 1), head.student.group), 0)
        self.logq_common = z[:, :common] - sums[:, :1]
        super().__init__(z, torch.logaddexp(sums[:, 0], sums[:, 1]), labels, head)
        self.value, self.weighted = divergence_terms(y.sub_(sums[:, 2:]), self.logq_common, head.beta)

    def sums(self) -> tuple[Tensor, Tensor]:
        """This rank's shares of divergence and summed weighted derivative."""
        return self.value.sum(1), self.weighted.sum(1)

    def gradient(self, d: Tensor, total: Tensor) -> Tensor:
        """Gradient of `d` times the divergence with respect to `z`."""
        grad = torch.zeros_like(self.logq)
        inner = grad[:, : self.weighted.shape[1]]
        torch.sub(self.weighted, self.logq_common.exp().mul_(total.unsqueeze(1)), out=inner)
        inner.mul_(d.unsqueeze(1))
        return grad


class _TopKChunk(_Chunk):
    """A chunk with the teacher's k most likely tokens."""

    def __init__(self, z: Tensor, labels: Tensor, ids: Tensor, logp: Tensor, head: _TwoHeads) -> None:
        group, columns = head.student.group, z.shape[1]
        local = ids - head.student.vocab_start
        inside = (local >= 0) & (local < columns)
        # Ids of other ranks go to a spare column: picking the others by a mask would wait for the device.
        self.at = local.where(inside, columns)
        spare = torch.nn.functional.pad(z, (0, 1), value=-math.inf)
        chosen = spare.gather(1, self.at).masked_fill_(~inside, 0.0)
        local_rest = torch.logsumexp(spare.scatter_(1, self.at, -math.inf)[:, :columns], 1)
        del spare
        unknown = ids >= head.student.vocab_valid
        gathered = _gathered(torch.cat((local_rest.unsqueeze(1), chosen), 1), group)
        rest, chosen = torch.logsumexp(gathered[:, :, 0], 0), gathered[:, :, 1:].sum(0)
        chosen = chosen.masked_fill(unknown, NO_LOGIT)
        total = torch.logaddexp(rest, torch.logsumexp(chosen, 1))
        super().__init__(z, total, labels, head)
        log_rest = (rest - total).clamp(min=LEAST_LOG_REST)
        logp = logp.to(z.dtype).masked_fill(unknown, LEAST_LOG_REST)
        teacher_rest = (1 - logp.exp().sum(1)).clamp(min=LEAST_REST).log()
        self.events = torch.cat((chosen - total.unsqueeze(1), log_rest.unsqueeze(1)), 1)  # log-probs of k + 1 events
        self.value, self.weighted = divergence_terms(
            torch.cat((logp, teacher_rest.unsqueeze(1)), 1), self.events, head.beta
        )

    def sums(self) -> tuple[Tensor, Tensor]:
        """Divergence and summed weighted derivative on the first rank, 0 on the others: all ranks know the events."""
        first = float(_rank(self.head.student.group) == 0)
        return self.value.sum(1) * first, self.weighted.sum(1) * first

    def gradient(self, d: Tensor, total: Tensor) -> Tensor:
        """Gradient of `d` times the divergence with respect to `z`."""
        of_rest = self.weighted[:, -1] / self.events[:, -1].exp()
        grad = self.q.new_empty(self.q.shape[0], self.q.shape[1] + 1)  # with the spare column
        torch.mul(self.q, (d * (of_rest - total)).unsqueeze(1), out=grad[:, :-1])
        inner = d.unsqueeze(1) * (self.weighted - self.events.exp() * total.unsqueeze(1))
        return grad.scatter_(1, self.at, inner[:, :-1])[:, :-1]


def divergence_terms(logp: Tensor, logq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Terms of the divergence of q from p, event by event, and each event's derivative times q.

    The gradient with respect to the logits of q is `weighted - q * weighted.sum()`.
    """
    p, q = logp.exp(), logq.exp()
    if beta == 0:
        return p * (logp - logq), -p
    if beta == 1:
        value = q * (logq - logp)
        return value, value
    logm = torch.logaddexp(logp + math.log(beta), logq + math.log1p(-beta))
    weighted = (1 - beta) * q * (logq - logm)
    return beta * p * (logp - logm) + weighted, weighted


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: _TwoHeads) -> tuple[Tensor, Tensor, Tensor]:
        rows, group = head.student.rows, head.student.group
        results = torch.zeros(4, hidden.shape[0], dtype=stats_dtype(hidden.dtype), device=hidden.device)
        for span in head.chunks():
            chunk = head.chunk_of(span, hidden.index_select(0, rows[span]), weight)
            local = torch.stack((chunk.label_logprob(), -chunk.negative_entropy(), *chunk.sums()))
            results[:, rows[span]] = _gathered(local, group).sum(0)
            del chunk  # before the next one's logits
        logprob, entropy, divergence, total = results.unbind()
        ctx.save_for_backward(hidden, weight, entropy[rows], total[rows])
        ctx.head = head
        return logprob.clone(), entropy.clone(), divergence.clone()

    @staticmethod
    @first_derivative_only("linear_divergence", "full logits")
    def backward(ctx: Any, for_logprob: Tensor, for_entropy: Tensor, for_divergence: Tensor) -> tuple[Any, ...]:
        hidden, weight, entropy, total = ctx.saved_tensors
        head: _TwoHeads = ctx.head
        student = head.student
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.zeros_like(hidden) if for_hidden else None
        weight_grad = student.main_grad
        if weight_grad is None and for_weight:
            weight_grad = torch.zeros_like(weight, dtype=stats_dtype(weight.dtype))
        for span in head.chunks():
            at = student.rows[span]
            x = hidden.index_select(0, at)
            chunk = head.chunk_of(span, x, weight)
            grad = chunk.gradient(for_divergence[at], total[span])
            chunk.add_gradients(grad, for_logprob[at], for_entropy[at], entropy[span])
            scores = torch.zeros(grad.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
            scores[:, : grad.shape[1]] = grad.mul_(head.inv_temp)
            if hidden_grad is not None:
                hidden_grad.index_copy_(0, at, torch.mm(scores, weight, out=torch.empty_like(x)))
            if weight_grad is not None:
                add_weight_grad(weight_grad, scores, x)
            del chunk, grad, scores
        if hidden_grad is not None and student.group is not None and student.group.size() > 1:
            dist.all_reduce(hidden_grad, group=student.group)
        returned = None if student.main_grad is not None or weight_grad is None else weight_grad.to(weight.dtype)
        return hidden_grad, returned, None


def _columns(vocab_valid: int, vocab_start: int, local: int) -> int:
    """Columns of this rank that hold tokens, not padding."""
    return min(max(vocab_valid - vocab_start, 0), local)


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def _gathered(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Values of all ranks, `[ranks, ...]`, in rank order, so that sums do not depend on the order of arrival."""
    if group is None or group.size() == 1:
        return values.unsqueeze(0)
    return gather_rows(values, group).view(group.size(), *values.shape)


def _taken(values: Tensor, place: Tensor, here: Tensor) -> Tensor:
    """`values[row, place[row]]` where `here` is set, else 0."""
    if not values.shape[1]:
        return values.new_zeros(values.shape[0])
    taken = values.gather(1, place.clamp(0, values.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return taken.masked_fill(~here, 0.0)
