"""Requests of a deterministic run have seeds that follow from the episode, and not from time or servers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from aiohttp import web
from fault_server import Server, answer, respond, tokens_of

from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.executor import run_episode
from megarl.rollout.sampling_seeds import SeedStream, gather_apart
from megarl.rollout.transcript import pad_responses
from megarl.types import GenerationHyperparameters, ModelRequest

TURNS = 2


class Turns(RolloutWorkflow):
    """Asks for a group of completions, turn after turn; waits in between as long as the prompt says."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        for _ in range(TURNS):
            await asyncio.sleep(data["wait_s"])
            sampling = GenerationHyperparameters(max_new_tokens=2, n_samples=3)
            responses = await engine.agenerate_group(ModelRequest(input_ids=[data["id"]], gconfig=sampling))
        return pad_responses(responses, [0.0] * len(responses))


@pytest.fixture
def seeds_of(start_server: Callable[..., Server], connect: Callable[..., RemoteSGLangEngine]) -> Callable[..., Any]:
    """`seeds_of(seed, waits, version)`: the seeds of each prompt's completions, in the order of its turns."""

    def ask(seed: int | None, waits: Mapping[int, float], version: int = 0) -> dict[int, list[Any]]:
        server = start_server()
        engine = connect(server)
        engine.seed = seed
        engine.set_version(version)
        engine.rollout_batch([{"id": key, "wait_s": wait} for key, wait in waits.items()], Turns())
        found: dict[int, list[Any]] = {}
        for body in server.bodies:
            seeds = [params.get("sampling_seed") for params in body["sampling_params"]]
            found.setdefault(body["input_ids"][0][0], []).append(seeds)
        return found

    return ask


def test_seeds_are_the_same_whenever_a_request_is_sent_and_differ_otherwise(seeds_of: Callable[..., Any]) -> None:
    first, again = seeds_of(7, {5: 0.0, 6: 0.02}), seeds_of(7, {5: 0.02, 6: 0.0})
    assert first == again
    drawn = [seed for turns in first.values() for turn in turns for seed in turn]
    assert len(drawn) == len(set(drawn)) == 2 * TURNS * 3
    assert all(0 <= seed < 2**63 for seed in drawn)
    for other in (seeds_of(8, {5: 0.0, 6: 0.0}), seeds_of(7, {5: 0.0, 6: 0.0}, version=1)):
        assert not set(drawn) & {seed for turns in other.values() for turn in turns for seed in turn}


class Conversations(RolloutWorkflow):
    """Two conversations of two turns beside each other, each as slow as the prompt says."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        responses = await gather_apart(self.converse(engine, data["id"] + k, w) for k, w in enumerate(data["waits"]))
        return pad_responses(responses, [0.0] * len(responses))

    async def converse(self, engine: InferenceEngine, prompt: int, wait_s: float) -> Any:
        for _ in range(TURNS):
            await asyncio.sleep(wait_s)
            sampling = GenerationHyperparameters(max_new_tokens=2)
            response = await engine.agenerate(ModelRequest(input_ids=[prompt], gconfig=sampling))
        return response


def test_the_turns_of_a_conversation_have_seeds_of_their_own_whichever_is_first(
    start_server: Callable[..., Server], connect: Callable[..., RemoteSGLangEngine]
) -> None:
    found = []
    for waits in ((0.0, 0.1), (0.1, 0.0)):
        server = start_server()
        engine = connect(server)
        engine.seed = 7
        engine.rollout_batch([{"id": 5, "waits": waits}], Conversations())
        seeds: dict[int, list[int]] = {}
        for body in server.bodies:
            for ids, params in zip(body["input_ids"], body["sampling_params"], strict=True):
                seeds.setdefault(ids[0], []).append(params["sampling_seed"])
        found.append(seeds)
    assert found[0] == found[1]
    assert len({seed for seeds in found[0].values() for seed in seeds}) == 2 * TURNS


def test_a_batch_has_other_seeds_than_a_streams_episode_of_the_same_number(
    start_server: Callable[..., Server], connect: Callable[..., RemoteSGLangEngine]
) -> None:
    """An evaluation's problem 0, and the first prompt of training."""
    server = start_server()
    engine = connect(server)
    engine.seed = 7
    engine.rollout_batch([{"id": 5, "wait_s": 0.0}], Turns())
    assert engine.submit(run_episode(engine, 0, {"id": 5, "wait_s": 0.0}, Turns())).result(300).group is not None
    drawn = [params["sampling_seed"] for body in server.bodies for params in body["sampling_params"]]
    assert len(drawn) == len(set(drawn)) == 2 * TURNS * 3


def test_ordinary_runs_send_no_seed(seeds_of: Callable[..., Any]) -> None:
    assert seeds_of(None, {5: 0.0}) == {5: [[None] * 3] * TURNS}


def test_a_completion_that_goes_on_keeps_its_seed(
    start_server: Callable[..., Server], connect: Callable[..., RemoteSGLangEngine]
) -> None:
    """The server aborts each completion after two tokens once; the rest is drawn from the same seed."""

    async def aborts_first(body: dict[str, Any], _: web.Request) -> web.StreamResponse:
        if len(body["input_ids"][0]) == 1:
            return respond([answer([11, 12], reason="abort") for _ in body["input_ids"]])
        return web.json_response(tokens_of(body))

    server = start_server(aborts_first)
    engine = connect(server)
    engine.seed = 7
    sampling = GenerationHyperparameters(max_new_tokens=6, n_samples=3)
    asked = engine.agenerate_group(ModelRequest(input_ids=[4], gconfig=sampling))
    assert engine.submit(asked).result(300)
    parts = [[params["sampling_seed"] for params in body["sampling_params"]] for body in server.bodies]
    assert len(parts) == 2
    assert sorted(parts[0]) == sorted(parts[1])
    assert len(set(parts[0])) == 3


def test_runs_of_one_prompt_have_seeds_of_their_own(
    start_server: Callable[..., Server], connect: Callable[..., RemoteSGLangEngine]
) -> None:
    server = start_server()
    engine = connect(server)
    engine.seed = 7
    asked = run_episode(engine, 3, {"id": 5, "wait_s": 0.0}, Turns(), group_size=2)
    assert engine.submit(asked).result(300).group is not None
    drawn = [params["sampling_seed"] for body in server.bodies for params in body["sampling_params"]]
    expected = [SeedStream(0, 3, run).take(7, TURNS * 3) for run in range(2)]
    assert sorted(drawn) == sorted(itertools.chain.from_iterable(expected))
    assert len(set(drawn)) == 2 * TURNS * 3
