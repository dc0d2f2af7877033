"""Wrappers of workflows for distillation: prompts that only the teacher reads, and answers of the teacher."""

from __future__ import annotations

import asyncio
import copy
import random
import string
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megarl.knobs import UserError
from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.transcript import prompt_ids
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.types import TEACHER_SAMPLED, ModelRequest, ModelResponse, PackedBatch

NOT_THE_POLICYS = -1  # version of tokens that no policy sampled


def hint_columns(hint: str) -> set[str]:
    """Columns that a hint names.

    Raises:
        UserError: its braces do not match, or hold anything but a column's name.
    """
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(hint) if name is not None}
    except ValueError as error:
        raise UserError(f"teacher.hint={hint!r} cannot be read ({error}); double braces that are no column") from error
    if wrong := sorted(name for name in names if not name.isidentifier()):
        raise UserError(f"teacher.hint={hint!r} names {{{wrong[0]}}}, which is no column; double such braces")
    return names


class HintedWorkflow(RolloutWorkflow):
    """Adds `teacher_prompt` to a workflow's samples: token ids of the prompt with a hint at its end.

    Args:
        inner: the workflow that samples; its policy never reads the hint.
        hint: text with `{column}` for the prompt's columns.
        most: entries of a prompt, -1 past its end; a longer one is rejected.
    """

    def __init__(self, inner: RolloutWorkflow, hint: str, most: int, tokenizer: Any) -> None:
        self.inner, self.hint, self.most, self.tokenizer = inner, hint, most, tokenizer
        self._options = {"enable_thinking": inner.enable_thinking} if isinstance(inner, RLVRWorkflow) else {}

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        ids = hinted_ids(data["messages"], self.hint.format(**data), self.tokenizer, **self._options)
        if len(ids) > self.most:
            return None
        result = await self.inner.arun_episode(engine, data)
        if result is None:
            return None
        row = torch.tensor(ids + [-1] * (self.most - len(ids)))
        return {**dict(result.items()), "teacher_prompt": row.expand(result["input_ids"].shape[0], -1).clone()}

    async def aclose(self) -> None:
        await self.inner.aclose()


def hinted_ids(messages: Sequence[dict[str, Any]], hint: str, tokenizer: Any, **options: Any) -> list[int]:
    """Token ids of a prompt whose last user message ends with the hint, on a line of its own.

    `options` go to the chat template, as for the student's prompt.
    """
    hinted = copy.deepcopy(list(messages))
    last = next((m for m in reversed(hinted) if m["role"] == "user"), None)
    if last is None:
        raise UserError("teacher.hint is added to the last user message, and a prompt has none; leave it out")
    last["content"] = f"{last['content']}\n{hint}"
    return prompt_ids(tokenizer, hinted, **options)


class _OnItsLoop(InferenceEngine):
    """A client used from another asyncio loop than its own: requests run there, rewards stay here."""

    def __init__(self, client: RemoteSGLangEngine) -> None:
        self._client = client

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return await asyncio.wrap_future(self._client.submit(self._client.agenerate(req)))

    async def agenerate_group(self, req: ModelRequest) -> list[ModelResponse]:
        return await asyncio.wrap_future(self._client.submit(self._client.agenerate_group(req)))

    def set_version(self, version: int) -> None:
        raise UserError("a teacher's server gets no weights of the run")

    def get_version(self) -> int:
        return self._client.get_version()

    def rollout_batch(self, data: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow) -> PackedBatch:
        return self._client.rollout_batch(data, workflow)


class TeacherAnswers(RolloutWorkflow):
    """Has the teacher's servers answer a share of the prompts, as GKD's lambda says.

    `teacher_sampled` tells such samples. Their tokens have version -1, and their log-probs are the teacher's.

    Args:
        inner: the workflow that samples, on either engine.
        teacher: the client of the teacher's servers.
        share: probability that the policy answers.
        seed: of the draws.
    """

    def __init__(self, inner: RolloutWorkflow, teacher: RemoteSGLangEngine, share: float, seed: int) -> None:
        self.inner, self.share = inner, share
        self._teacher = _OnItsLoop(teacher)
        self.seed = seed

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        by_policy = random.Random(f"{self.seed} {data.get('prompt_id')}").random() < self.share
        if by_policy:
            result = await self.inner.arun_episode(engine, data)
        else:
            self._teacher.max_sequence_tokens = engine.max_sequence_tokens
            result = await self.inner.arun_episode(self._teacher, data)
        if result is None:
            return None
        samples: dict[str, Any] = dict(result.items())
        samples[TEACHER_SAMPLED] = torch.full((samples["input_ids"].shape[0],), not by_policy)
        if not by_policy and "versions" in samples:
            samples["versions"] = torch.full_like(samples["versions"], NOT_THE_POLICYS)
        return samples

    async def aclose(self) -> None:
        await self.inner.aclose()
