"""The teacher of `algorithm=opd`: log-probs of each batch's tokens under it, from one of three sources.

    trainer    a frozen model in the trainer's ranks
    server     SGLang servers that rank 0 asks
    policy     the student itself, which reads a hint that it does not see when it samples

`score` sets `teacher_logp` for divergence=sampled, and the most likely tokens for top_k. For full, the student's update
asks the frozen model for hidden states itself (`actor/distillation.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.actor.distillation import TOP_IDS, TOP_LOGPROBS, Distillation, MegatronTeacher, top_k_of
from megarl.actor.engine import MegatronEngine
from megarl.algorithms import OPDConfig
from megarl.config import Config
from megarl.parallel.broadcast import broadcast_batch, broadcast_json
from megarl.rollout.client.scoring import Query, Scorer, Scores, TeacherLostError
from megarl.teacher_checks import teacher_engine
from megarl.types import PackedBatch, cu_seqlens_of

TEACHER_PROMPT = "teacher_prompt"  # int64 [num_seqs, teacher.max_prompt_tokens], -1 past its end


class Teacher:
    """The teacher of a run, on every rank.

    Args:
        student: the engine that is trained, initialised.
        scorer: the client of the teacher's servers, on rank 0 with source=server.
    """

    def __init__(self, config: Config, student: MegatronEngine, scorer: Scorer | None = None) -> None:
        algorithm = config.algorithm
        assert isinstance(algorithm, OPDConfig), "checks.py"
        self._k = algorithm.top_k if algorithm.divergence == "top_k" else 0
        self._divergence, self._source = algorithm.divergence, config.teacher.source
        self._student, self._scorer = student, scorer
        self._frozen: MegatronTeacher | None = None
        if self._source == "trainer":
            self._frozen = MegatronTeacher(teacher_engine(config), config.parallel)
            self._frozen.initialize()
        full = self._frozen if algorithm.divergence == "full" else None
        self.loss_source = None if algorithm.divergence == "sampled" else Distillation(student, algorithm.beta, full)
        if self._frozen is not None:
            self._frozen.offload()

    def score(self, batch: PackedBatch) -> None:
        """Adds the teacher's figures of the batch's tokens to it. A collective.

        Raises:
            TeacherLostError: on every rank; no server answered in time.
        """
        if self._divergence == "full":
            return
        read, index = batch, None
        if TEACHER_PROMPT in batch:
            read, index = with_teacher_prompts(batch)
        figures = self._ask_servers(read) if self._source == "server" else self._ask_model(read)
        for key, values in figures.items():
            batch.set_tokens(key, values if index is None else _at(values, index))

    def _ask_model(self, batch: PackedBatch) -> dict[str, Tensor]:
        engine: Any = self._student
        if self._frozen is not None:
            self._frozen.onload()
            engine = self._frozen
        engine.eval()
        if self._k:
            ids, logprobs = top_k_of(engine, batch, self._k, self._student.hf_config.vocab_size)
            figures = {TOP_IDS: ids, TOP_LOGPROBS: logprobs}
        else:
            figures = {"teacher_logp": engine.logprobs(batch, trained_only=True)}
        if self._frozen is not None:
            self._frozen.offload()
        return figures

    def _ask_servers(self, batch: PackedBatch) -> dict[str, Tensor]:
        figures, failure = {}, ""
        if self._scorer is not None:
            try:
                figures = score_by_servers(self._scorer, batch, self._k)
            except TeacherLostError as error:
                failure = str(error)
        if failure := broadcast_json(failure):
            raise TeacherLostError(failure)
        sent = PackedBatch(batch.cu_seqlens, figures) if self._scorer is not None else None
        return broadcast_batch(sent).tokens

    def destroy(self) -> None:
        if self._frozen is not None:
            self._frozen.destroy()


def score_by_servers(scorer: Scorer, batch: PackedBatch, k: int) -> dict[str, Tensor]:
    """Asks servers for a batch's trained tokens. Tokens outside `loss_mask` get 0."""
    mask = batch["loss_mask"].bool()
    ids, masks = batch.split(batch["input_ids"]), batch.split(mask)
    starts = [max(1, int(flags.int().argmax())) if bool(flags.any()) else 0 for flags in masks]
    asked = [i for i, start in enumerate(starts) if start]
    found = scorer.score([Query(ids[i].tolist(), starts[i]) for i in asked], k)

    def spread(take: Callable[[Scores], Any], dtype: torch.dtype, *shape: int) -> Tensor:
        values = torch.zeros(batch.total_tokens, *shape, dtype=dtype)
        for i, scores in zip(asked, found, strict=True):
            values[batch.bounds[i] + starts[i] : batch.bounds[i + 1]] = torch.tensor(take(scores), dtype=dtype)
        return values * mask.view(-1, *(1 for _ in shape))

    if not k:
        return {"teacher_logp": spread(lambda scores: scores.logprobs, torch.float32)}
    return {
        TOP_IDS: spread(lambda scores: scores.top_ids, torch.int32, k),
        TOP_LOGPROBS: spread(lambda scores: scores.top_logprobs, torch.float32, k),
    }


def with_teacher_prompts(batch: PackedBatch) -> tuple[PackedBatch, Tensor]:
    """Replaces the tokens before each sequence's first trained one by its `teacher_prompt`.

    Returns the batch, and for each token of `batch` its position there, -1 for tokens of prompts. Only token ids,
    `loss_mask` and `group_ids` are kept.
    """
    ids, masks, index, lengths = [], [], [], []
    total = 0
    parts = zip(batch.split(batch["input_ids"]), batch.split(batch["loss_mask"].bool()), strict=True)
    for row, (tokens, mask) in enumerate(parts):
        prompt = batch[TEACHER_PROMPT][row]
        prompt = prompt[prompt >= 0]
        first = int(mask.int().argmax())
        ids.append(torch.cat((prompt, tokens[first:])))
        masks.append(torch.cat((torch.zeros(len(prompt), dtype=torch.bool), mask[first:])))
        places = torch.arange(len(tokens) - first) + total + len(prompt)
        index.append(torch.cat((torch.full((first,), -1), places)))
        lengths.append(len(ids[-1]))
        total += lengths[-1]
    sequences = {"group_ids": batch["group_ids"]} if "group_ids" in batch else {}
    read = PackedBatch(
        cu_seqlens_of(torch.tensor(lengths)), {"input_ids": torch.cat(ids), "loss_mask": torch.cat(masks)}, sequences
    )
    read.shared = batch.shared
    return read, torch.cat(index)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]`, 0 where the index is -1."""
    taken = values[index.clamp(min=0)]
    return taken * (index >= 0).view(-1, *(1 for _ in values.shape[1:]))
