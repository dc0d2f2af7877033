"""Poisoned completions from a server: left out and counted, and the rest trains to the same bits as without them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from fault_server import Server, answer, respond
from torch import Tensor

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.weights import hf_weights
from megarl.algorithms import GRPO, GRPOConfig
from megarl.observe.metrics import stats_tracker
from megarl.rollout.api import RolloutWorkflow
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.transcript import pad_responses
from megarl.types import GenerationHyperparameters, ModelRequest, PackedBatch

VOCAB_SIZE = 343
SOUND = [[answer([7, 40, 3]), answer([8, 9]), answer([61, 5, 77, 12])], [answer([200, 4]), answer([33, 34, 36])]]


def poisoned(ids: list[int], **meta: Any) -> dict[str, Any]:
    part = answer(ids)
    part["meta_info"] |= meta
    return part


POISONS = {
    "NaN log-prob": (poisoned([9, 5], output_token_logprobs=[[-0.1, 9, None], [math.nan, 5, None]]), "not finite"),
    "infinite log-prob": (poisoned([9], output_token_logprobs=[[-math.inf, 9, None]]), "not finite"),
    "empty completion": (answer([], reason="stop"), "no token to train on"),
    "too few log-probs": (poisoned([9, 5], output_token_logprobs=[[-0.1, 9, None]]), "not finite"),
    "too few versions": (poisoned([9, 5], weight_versions=[{"version": "0", "start": 0, "end": 1}]), "not finite"),
    "id above the vocabulary": (answer([9, VOCAB_SIZE]), "token outside the vocabulary"),
    "negative id": (
        poisoned([-1, 9], output_token_logprobs=[[-0.1, -1, None], [-0.2, 9, None]]),
        "token outside the vocabulary",
    ),
    "log-prob above 0": (poisoned([9, 5], output_token_logprobs=[[-0.1, 9, None], [0.5, 5, None]]), "not finite"),
}


class Group(RolloutWorkflow):
    """`data["count"]` completions of a prompt of one token; the reward depends on what was sampled."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        sampling = GenerationHyperparameters(max_new_tokens=8)
        requests = (ModelRequest(input_ids=[20 + data["i"]], gconfig=sampling) for _ in range(data["count"]))
        responses = await asyncio.gather(*(engine.agenerate(request) for request in requests))
        return pad_responses(responses, [float(sum(r.output_tokens) % 5) for r in responses])


def sampled(start_server: Callable[..., Server], connect: Callable[..., Any], groups: list[list[Any]]) -> PackedBatch:
    """The batch of a client whose server answers the i-th prompt with `groups[i]`."""

    async def reply(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return respond(groups[body["input_ids"][0][0] - 20])

    engine: RemoteSGLangEngine = connect(start_server(reply))
    engine.vocab_size = VOCAB_SIZE
    return engine.rollout_batch([{"i": i, "count": len(group)} for i, group in enumerate(groups)], Group())


def step(folder: Path, batch: PackedBatch) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and weights of a fresh actor after one GRPO step."""
    actor = MegatronPPOActor(EngineConfig(path=str(folder), optimizer=OptimizerConfig(lr=1e-3)), GRPO(GRPOConfig()))
    actor.initialize()
    batch["prox_logp"] = actor.compute_logp(batch)
    actor.compute_advantages(batch)
    actor.ppo_update(batch)
    parameters = list(hf_weights.parameters(actor.modules))
    gradients = [p.main_grad.clone() for p in parameters]  # type: ignore[attr-defined]
    weights = [p.detach().clone() for p in parameters]
    actor.destroy()
    return gradients, weights


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3", tied=True, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("kind", [*POISONS, "all of them"])
def test_the_others_are_sampled_as_if_it_had_not_been_there(start_server, connect, kind: str) -> None:
    bad = [part for part, _ in POISONS.values()] if kind == "all of them" else [POISONS[kind][0]]
    clean = sampled(start_server, connect, SOUND)
    stats_tracker.export()
    mixed = sampled(start_server, connect, [[SOUND[0][0], *bad, *SOUND[0][1:]], [*bad, *SOUND[1]]])
    assert stats_tracker.export()["rollout/dropped_samples"] == 2 * len(bad)
    assert torch.equal(mixed.cu_seqlens, clean.cu_seqlens)
    assert mixed.tokens.keys() == clean.tokens.keys()
    assert mixed.sequences.keys() == clean.sequences.keys()
    for key in (*clean.tokens, *clean.sequences):
        assert torch.equal(mixed[key], clean[key]), key


@pytest.mark.parametrize("kind", POISONS)
def test_it_is_counted_under_its_reason(start_server, connect, kind: str) -> None:
    async def reply(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return respond([SOUND[0][0], POISONS[kind][0]])

    engine = connect(start_server(reply))
    engine.vocab_size = VOCAB_SIZE
    engine.rollout_batch([{"i": 0, "count": 2}], Group())
    (reason,) = engine.episodes[0].dropped
    assert POISONS[kind][1] in reason
    assert engine.episodes[0].dropped[reason] == 1


def test_the_gradients_and_the_weights_after_a_step_are_those_without_them(start_server, connect, folder) -> None:
    bad = [part for part, _ in POISONS.values()]
    clean = step(folder, sampled(start_server, connect, SOUND))
    mixed = step(folder, sampled(start_server, connect, [[*bad, *SOUND[0]], [SOUND[1][0], *bad, SOUND[1][1]]]))
    assert any(gradient.any() for gradient in clean[0])
    for expected, actual in zip(clean[0] + clean[1], mixed[0] + mixed[1], strict=True):
        assert torch.equal(expected, actual)
