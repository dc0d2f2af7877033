"""A student beside its teacher: teacher models in the trainer's ranks, and the divergence as input of a loss.

A full divergence needs the teacher's logits. They are recomputed chunk by chunk from its last hidden states, which are
kept: `[trained tokens, hidden]` in place of `[trained tokens, vocabulary]`. The teacher's layers are on the host by
then; its LM head stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.actor.batch.microbatch import Microbatch, shift_right
from megarl.actor.engine import MegatronEngine
from megarl.actor.model import heads
from megarl.actor.reference import MegatronReference
from megarl.ops.divergence import FullTeacher, TopKTeacher, top_k_logprobs
from megarl.ops.gather import gather_rows
from megarl.ops.linear_logprob import product
from megarl.types import PackedBatch

TOP_IDS, TOP_LOGPROBS, DIVERGENCE = "teacher_ids", "teacher_top_logp", "divergence"
TOP_K_ROWS = 512  # rows of logits in memory while the most likely tokens are found


class MegatronTeacher(MegatronReference):
    """Frozen teacher model. The student's divergence is computed from its hidden states."""

    @torch.no_grad()
    def hidden_rows(self, batch: PackedBatch, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Computes hidden states `[trained tokens of this cp rank, hidden]` of a student's microbatches.

        Empty on all pipeline stages but the last. Moves the weights to the host afterwards. A collective.
        """
        self.onload()
        self.eval()

        def process(output: Tensor, mb: Microbatch) -> Tensor:
            return self._hidden(output, mb).index_select(0, mb.trained_labels.rows)

        rows = self.run_forward([self._microbatch(batch, mb.indices, 1.0) for mb in microbatches], process)
        self.offload()
        return rows

    def head_for(self, vocab_start: int, columns: int) -> Tensor:
        """Copies rows of the LM head from `vocab_start` on, `[columns, hidden]`, 0 past its end. A collective of tp.

        Student and teacher may pad their vocabularies to different sizes, and so be cut at different tokens.
        """
        self.onload()
        weight = heads.weight_of(self.stages[-1]).detach()
        if self.groups.tp_size > 1:
            weight = gather_rows(weight, self.groups.tp)
        part = weight[vocab_start : vocab_start + columns]
        missing = columns - part.shape[0]
        return torch.nn.functional.pad(part, (0, 0, 0, missing)).clone()


class Distillation:
    """Loss inputs of a student: log-probs and entropies, and `divergence` in the microbatch. A `LossSource`.

    With a teacher its whole distribution counts. Without one, microbatches have its most likely tokens as
    `teacher_ids` and `teacher_top_logp` `[tokens, k]`.
    """

    def __init__(self, student: MegatronEngine, beta: float, teacher: MegatronTeacher | None = None) -> None:
        self.student, self.beta, self.teacher = student, beta, teacher
        self._rows: dict[int, Tensor] = {}  # hidden states by the first sequence of the student's microbatch
        self._head: Tensor | None = None
        if teacher is not None and student.groups.is_last_stage:
            columns = heads.weight_of(student.stages[-1]).shape[0]
            self._head = teacher.head_for(student.groups.tp_rank * columns, columns)

    def prepare(self, batch: PackedBatch, microbatches: Sequence[Microbatch]) -> None:
        if self.teacher is not None:
            rows = self.teacher.hidden_rows(batch, microbatches)
            self._rows = {mb.indices[0]: part for mb, part in zip(microbatches, rows, strict=False) if mb.indices}

    def __call__(self, output: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        student, labels = self.student, microbatch.trained_labels
        hidden = student._hidden(output, microbatch)
        local = heads.divergence(
            hidden,
            labels,
            student.stages[-1],
            student.groups,
            student.hf_config.vocab_size,
            student.config.temperature,
            torch.float32 if student.config.float32_head else hidden.dtype,
            self._teacher_of(microbatch),
            self.beta,
        )
        logprobs, entropy, divergence = (microbatch.gather(x, student.groups.cp) for x in local)
        microbatch.aligned.set_tokens(DIVERGENCE, divergence)
        return logprobs, entropy

    def _teacher_of(self, mb: Microbatch) -> FullTeacher | TopKTeacher:
        if self.teacher is not None:
            assert self._head is not None, "the last stage has it"
            return FullTeacher(self._rows.pop(mb.indices[0]), self._head, self.teacher.hf_config.vocab_size)
        rows = mb.trained_labels.rows
        at = rows if mb.local is None else mb.local.source[rows]
        return TopKTeacher(mb.aligned[TOP_IDS][at].long(), mb.aligned[TOP_LOGPROBS][at])


@torch.no_grad()
def top_k_of(engine: MegatronEngine, batch: PackedBatch, k: int, below: int) -> tuple[Tensor, Tensor]:
    """Finds an engine's k most likely tokens with ids below `below`, in place of each trained token.

    Returns:
        ids, int32, and log-probs, float32, `[total_tokens, k]` each, 0 outside `loss_mask`. A collective.
    """

    def process(output: Tensor, mb: Microbatch) -> Tensor:
        hidden, weight = engine._hidden(output, mb), heads.weight_of(engine.stages[-1])
        groups = engine.groups
        top_tokens = torch.zeros(hidden.shape[0], 2 * k, device=hidden.device)
        for rows in mb.trained_labels.rows.split(TOP_K_ROWS):
            dtype = torch.float32 if engine.config.float32_head else hidden.dtype
            logits = product(hidden[rows], weight, hidden.new_empty(len(rows), weight.shape[0], dtype=dtype))
            ids, logprobs = top_k_logprobs(
                logits / engine.config.temperature,
                k,
                vocab_valid=engine.hf_config.vocab_size,
                vocab_start=groups.tp_rank * weight.shape[0],
                group=groups.tp if groups.tp_size > 1 else None,
                below=below,
            )
            top_tokens[rows] = torch.cat((ids.float(), logprobs), 1)  # float32 holds ids below 2^24
        return shift_right(mb.gather(top_tokens, groups.cp), mb.last)

    engine.eval()
    rows: Any = torch.cat(engine._collect(batch, process))
    return rows[:, :k].to(torch.int32), rows[:, k:].contiguous()
