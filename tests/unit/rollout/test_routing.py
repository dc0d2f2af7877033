"""Routing of requests to servers, and their fate when the server is taken out of service."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from aiohttp import web
from fault_server import tokens_of
from test_sglang_client import Asks, ask, hangs, request
from test_supervisor import Scripted, until

from megarl.rollout.api import GenerationError
from megarl.rollout.executor import WorkflowError
from megarl.rollout.routing import MAX_IMBALANCE, Router, WeightsWanted
from megarl.rollout.servers.supervisor import Supervisor
from tests.clocks import put_forward

PROMPT = list(range(100, 140))


class Fleet:
    """Servers that the test takes out of service and puts back."""

    def __init__(self, *addresses: str, outlook: str = "none") -> None:
        self.addresses, self.outlook_ = list(addresses), outlook

    def serving(self) -> list[str]:
        return list(self.addresses)

    def outlook(self) -> str:
        return self.outlook_


def routed(max_per_server: int = 1024) -> Router:
    router = Router(max_per_server)
    router.set(["a", "b"])
    return router


def on_a_loop(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 300))


def test_a_group_and_later_turns_go_to_the_server_that_has_read_their_beginning() -> None:
    async def check() -> None:
        router = routed()
        async with router.place(PROMPT, 1, (), 1) as first:
            pass
        answer, other = range(200, 300), "b" if first == "a" else "a"
        router.answered([*PROMPT, *answer], first)
        for _ in range(6):  # so without a reason the other is chosen, which was asked least
            async with router.place([5], 1, (other,), 1) as same:
                assert same == first
        async with router.place(PROMPT, 1, (), 1) as again:
            assert again == first
        async with router.place([*PROMPT, *answer, *range(20)], 1, (), 1) as later:
            assert later == first
        async with router.place([*PROMPT, *range(500, 800)], 1, (), 1) as spread:  # less than half is no reason
            assert spread == other
        async with router.place(PROMPT, MAX_IMBALANCE + 1, (), 1) as loaded, router.place(PROMPT, 1, (), 1) as spared:
            assert (loaded, spared) == (first, other)

    on_a_loop(check())


def test_prompts_that_only_begin_alike_are_spread_over_the_servers() -> None:
    template = list(range(16))

    async def check() -> None:
        router = routed()
        addresses: list[str] = []
        async with contextlib.AsyncExitStack() as groups:
            for i in range(8):
                addresses.append(await groups.enter_async_context(router.place([*template, 50 + i], 8, (), 1)))
        assert sorted(addresses) == ["a"] * 4 + ["b"] * 4

    on_a_loop(check())


def test_requests_wait_while_every_server_has_as_many_as_it_may() -> None:
    async def check() -> None:
        router = routed(max_per_server=2)
        async with router.place([1], 2, (), 1), router.place([2], 2, (), 1):
            with pytest.raises(GenerationError, match=r"no server had room for a request within 0\.2 s"):
                async with router.place([3], 1, (), 0.2):
                    raise AssertionError("there was no room")
            waiting = asyncio.ensure_future(router.place([3], 2, (), 300).__aenter__())
            await asyncio.sleep(0.15)
            assert not waiting.done()
        assert await waiting in ("a", "b")
        async with router.place([4], 9, (), 1):  # a group larger than the bound goes to an idle server
            pass

    on_a_loop(check())


def test_a_request_at_a_server_that_is_taken_out_is_asked_of_another(start_server, connect) -> None:
    stuck, sound = start_server(hangs), start_server()
    engine = connect(stuck, sound)
    fleet = Fleet(stuck.address, sound.address)
    engine.follow(fleet)

    def take_out() -> None:
        while not stuck.bodies:
            time.sleep(0.01)
        fleet.addresses.remove(stuck.address)
        engine.refresh()

    thread = threading.Thread(target=take_out)
    thread.start()
    (response,) = ask(engine, request(1))
    thread.join(300)
    assert response.output_tokens == [2, 3, 4]
    assert (len(stuck.bodies), len(sound.bodies)) == (1, 1)
    assert engine.addresses == [sound.address]


def test_requests_under_way_at_a_living_server_that_failed_a_sync_are_asked_of_another_at_once(
    start_server, connect
) -> None:
    stuck, sound = start_server(hangs), start_server()
    engine = connect(stuck, sound)
    supervisor = Supervisor([Scripted(stuck.address), Scripted(sound.address)], heartbeat_s=60, max_restarts=1)
    engine.follow(supervisor)
    supervisor.on_change = engine.refresh

    def drop() -> None:
        while not stuck.bodies:
            time.sleep(0.01)
        supervisor.after_sync([sound.address])

    thread = threading.Thread(target=drop)
    thread.start()
    (response,) = ask(engine, request(1))
    thread.join(300)
    assert response.output_tokens == [2, 3, 4]
    deadline = time.monotonic() + 300
    while not stuck.cancelled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stuck.cancelled == 1  # and not asked in vain for an answer that nobody waits for


def test_servers_that_die_under_a_request_are_not_counted_as_its_attempts(start_server, connect) -> None:
    fleet = Fleet()

    async def dies(body: Any, request: web.Request) -> web.StreamResponse:
        fleet.addresses.remove(request.host)
        engine.refresh()
        request.transport.abort()  # type: ignore[union-attr]
        return web.Response()

    servers = [start_server(dies) for _ in range(4)] + [start_server()]
    fleet.addresses = [server.address for server in servers]
    engine = connect(*servers, max_retries=1)
    engine.follow(fleet)
    assert ask(engine, request(1))[0].output_tokens == [2, 3, 4]
    assert [len(server.bodies) for server in servers][-1] == 1


def test_a_server_that_dies_while_a_request_waits_to_be_sent_again_is_no_attempt(start_server, connect) -> None:
    """Each server answers 500, and is taken out of service in the pause before the next attempt."""
    fleet = Fleet()

    async def fails_then_dies(body: Any, request: web.Request) -> web.StreamResponse:
        async def leaves() -> None:
            while engine.router._load[request.host]:  # until the answer is read, and the pause begins
                await asyncio.sleep(0.01)
            fleet.addresses.remove(request.host)
            engine.refresh()
            asked = requests()
            while requests() == asked:  # until the pause is over
                put_forward(engine._thread.loop, 700.0)
                await asyncio.sleep(0.05)

        leaving.append(asyncio.ensure_future(leaves()))
        return web.Response(status=500)

    def requests() -> int:
        return sum(len(server.bodies) for server in servers)

    leaving: list[Any] = []
    servers = [start_server(fails_then_dies) for _ in range(4)] + [start_server()]
    fleet.addresses = [server.address for server in servers]
    engine = connect(*servers, max_retries=1, retry_delay_s=600.0, request_timeout_s=1e6, connect_timeout_s=1e6)
    engine.follow(fleet)
    assert ask(engine, request(1))[0].output_tokens == [2, 3, 4]
    assert sum(len(server.bodies) for server in servers[:-1]) > 1
    until(lambda: all(leave.done() for leave in leaving))
    assert all(leave.exception() is None for leave in leaving)


def test_a_server_that_was_lost_and_comes_back_begins_with_no_load() -> None:
    async def check() -> None:
        router = routed(4)
        async with contextlib.AsyncExitStack() as before:
            for _ in range(2):
                await before.enter_async_context(router.place([1], 3, ("b",), 1))
                router.set(["b"])
                router.set(["a", "b"])
            async with router.place([2], 3, ("b",), 1) as back:
                assert back == "a"
                await before.aclose()  # what was lost ends; the load of the returned server stays
                assert router._load["a"] == 3
        assert router._load == {"a": 0, "b": 0}

    on_a_loop(check())


def test_with_no_server_left_and_none_to_come_the_error_says_so_at_once(start_server, connect) -> None:
    engine = connect(start_server())
    engine.follow(Fleet(outlook="none"))
    with pytest.raises(WorkflowError, match="no rollout server is left to ask") as caught:
        ask(engine, request(1))
    assert isinstance(caught.value.__cause__, GenerationError)
    assert caught.value.__cause__.fatal


def test_requests_wait_for_a_server_that_starts(start_server, connect) -> None:
    server = start_server()
    engine = connect(server)
    fleet = Fleet(outlook="starting")
    engine.follow(fleet)

    def start() -> None:
        time.sleep(0.3)
        fleet.addresses.append(server.address)
        engine.refresh()

    thread = threading.Thread(target=start)
    thread.start()
    assert ask(engine, request(1))[0].output_tokens == [2, 3, 4]
    thread.join(300)


def test_where_only_a_server_without_weights_is_left_the_trainer_is_told_and_episodes_wait(
    start_server, connect
) -> None:
    server = start_server()
    engine = connect(server)
    fleet = Fleet(outlook="ready")
    engine.follow(fleet)
    with pytest.raises(WeightsWanted):
        ask(engine, request(1))

    class Loader:
        batch_size = 1

        def __iter__(self) -> Any:
            return iter([[{"row": 0}], [{"row": 1}]])

    loader, workflow = Loader(), Asks(request(5))
    with pytest.raises(WeightsWanted):
        engine.prepare_batch(loader, workflow)
    fleet.addresses.append(server.address)  # the trainer has brought the weights
    engine.refresh()
    engine.prepare_batch(loader, workflow)
    assert [episode.prompt_id for episode in engine.episodes] == ["0"]
    assert len(server.bodies) == 1


def test_back_pressure_holds_for_each_server_of_an_engine(start_server, connect) -> None:
    under_way: list[int] = [0]
    peak: list[int] = [0]

    async def slow(body: Any, request: web.Request) -> web.StreamResponse:
        under_way[0] += 1
        peak[0] = max(peak[0], under_way[0])
        await asyncio.sleep(0.05)
        under_way[0] -= 1
        return web.json_response(tokens_of(body))

    engine = connect(start_server(slow), max_per_server=2)
    assert len(ask(engine, *(request(i) for i in range(7)))) == 7
    assert peak[0] == 2
