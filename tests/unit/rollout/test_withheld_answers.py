"""Answers of a new weight version are withheld until its servers are proven; `probe` asks servers one by one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from fault_server import Server, answer, tokens_of
from test_routing import Fleet
from test_sglang_client import ask, request

from megarl.rollout.api import GenerationError
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.routing import Router, ServerLost
from megarl.types import GenerationHyperparameters, ModelResponse


def serves(version: str, token: int = 7, started: threading.Event | None = None) -> Any:
    """A server's reply under weights of `version`: copies of one token, which tell servers apart."""

    async def reply(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if started is not None:
            started.set()
        return web.json_response(
            [answer([token] * params["max_new_tokens"], version) for params in body["sampling_params"]]
        )

    return reply


class Asked:
    """A request in a thread of its own."""

    def __init__(self, engine: RemoteSGLangEngine) -> None:
        self.responses: list[ModelResponse] = []
        self._thread = threading.Thread(target=lambda: self.responses.extend(ask(engine, request(1, 2))), daemon=True)
        self._thread.start()

    def within(self, seconds: float) -> list[ModelResponse]:
        self._thread.join(seconds)
        return self.responses


def test_answers_of_the_held_version_wait_for_the_release_and_earlier_ones_do_not(
    start_server: Callable[..., Server], connect: Callable[..., RemoteSGLangEngine]
) -> None:
    new, old = connect(start_server(serves("3"))), connect(start_server(serves("2")))
    for engine in (new, old):
        engine.hold(3)
    waiting, prompt = Asked(new), Asked(old)
    assert [response.output_versions for response in prompt.within(300)] == [[2] * 3]
    assert waiting.within(0.3) == []
    new.release()
    assert waiting.within(300)[0].output_versions == [3] * 3
    assert ask(new, request(1, 2))[0].output_versions == [3] * 3  # nothing is withheld any more


def test_a_withheld_answer_of_a_server_that_is_left_out_is_asked_again_at_another(
    start_server: Callable[..., Server], connect: Callable[..., RemoteSGLangEngine]
) -> None:
    started = threading.Event()
    wrong, right = start_server(serves("3", 66, started)), start_server(serves("3", 55))
    engine = connect(wrong, right)
    fleet = Fleet(wrong.address)
    engine.follow(fleet)
    engine.hold(3)
    waiting = Asked(engine)
    assert started.wait(300)
    assert waiting.within(0.3) == []  # it is withheld by now
    fleet.addresses[:] = [right.address]

    async def verdict() -> None:  # in one turn of the loop, the release must not let the wrong answer through
        engine.router.refresh()
        engine.router.release()

    assert engine._thread is not None
    engine._thread.run(verdict(), 300, "the verdict")
    assert [response.output_tokens for response in waiting.within(300)] == [[55] * 3]
    assert (len(wrong.bodies), len(right.bodies)) == (1, 1)


def test_an_answer_that_is_never_released_fails_in_time() -> None:
    async def check() -> None:
        router = Router(8)
        router.hold(3)
        await router.released(2, 0.1)
        with pytest.raises(GenerationError, match=r"no server was proven to serve version 3 right within 0\.1 s"):
            await router.released(3, 0.1)

    asyncio.run(check())


def test_an_answer_that_comes_as_its_server_is_lost_is_discarded() -> None:
    async def check() -> None:
        router = Router(8)
        router.set(["a"])
        arrived = asyncio.get_running_loop().create_future()

        async def answer() -> int:
            return await arrived

        result = asyncio.ensure_future(router.unless_lost("a", answer()))
        await asyncio.sleep(0.01)
        arrived.set_result(1)
        router.set([])
        with pytest.raises(ServerLost):
            await result

    asyncio.run(check())


def test_a_probe_asks_every_server_itself_and_tells_what_each_said(
    start_server: Callable[..., Server], connect: Callable[..., RemoteSGLangEngine]
) -> None:
    attempts: list[int] = []

    async def stumbles(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        attempts.append(1)
        return web.json_response(tokens_of(body)) if len(attempts) > 1 else web.Response(status=503)

    async def broken(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return web.Response(status=500, text="out of memory")

    servers = [start_server(serves("4")), start_server(stumbles), start_server(broken)]
    engine = connect(*servers)
    engine.hold(4)  # a probe is not withheld
    prompts = [[1, 2], [3]]
    found = engine.probe([s.address for s in servers], prompts, GenerationHyperparameters(max_new_tokens=2))
    first, second, third = (found[s.address] for s in servers)
    assert isinstance(first, list)
    assert [(r.input_tokens, r.output_tokens, r.output_versions) for r in first] == [
        ([1, 2], [7, 7], [4, 4]),
        ([3], [7, 7], [4, 4]),
    ]
    assert isinstance(second, list)
    assert [r.output_tokens for r in second] == [[3, 4], [4, 5]]
    assert isinstance(third, GenerationError)
    assert "answered 500: out of memory; that was attempt 3 of 3" in str(third)
    assert [len(server.bodies) for server in servers] == [1, 2, 3]


def test_a_probe_says_nothing_of_a_server_that_goes_out_of_service(
    start_server: Callable[..., Server], connect: Callable[..., RemoteSGLangEngine]
) -> None:
    started = threading.Event()

    async def silent(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        started.set()
        await asyncio.sleep(3600)
        raise AssertionError("the client did not hang up")

    server = start_server(silent)
    engine = connect(server)
    fleet = Fleet(server.address)
    engine.follow(fleet)

    def leave() -> None:
        started.wait(300)
        fleet.addresses.clear()
        engine.refresh()

    threading.Thread(target=leave, daemon=True).start()
    assert engine.probe([server.address], [[1]], GenerationHyperparameters(max_new_tokens=2)) == {}
