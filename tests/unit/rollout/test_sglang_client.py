import asyncio
import contextlib
import json
import math
import threading
import time
from typing import Any

import pytest
import torch
from aiohttp import web
from fault_server import answer, tokens_of

from megarl.knobs import UserError
from megarl.observe.metrics import stats_tracker
from megarl.rollout import executor
from megarl.rollout.api import GenerationError, RolloutWorkflow
from megarl.rollout.client.requests import parse_answer, sampling_params
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.config import RolloutConfig
from megarl.rollout.executor import WorkflowError
from megarl.rollout.transcript import pad_responses
from megarl.types import GenerationHyperparameters, ModelRequest, ModelResponse
from tests.clocks import put_forward


class Asks(RolloutWorkflow):
    """Sends its requests at once, keeps the responses."""

    def __init__(self, *requests: ModelRequest):
        self.requests = requests
        self.responses: list[ModelResponse] = []

    async def arun_episode(self, engine, data):
        self.responses = await asyncio.gather(*(engine.agenerate(request) for request in self.requests))
        return pad_responses(self.responses, [0.0] * len(self.responses))


class AsksGroups(Asks):
    """Sends each request for all samples of it."""

    async def arun_episode(self, engine, data):
        groups = await asyncio.gather(*(engine.agenerate_group(request) for request in self.requests))
        self.responses = [response for group in groups for response in group]
        return pad_responses(self.responses, [0.0] * len(self.responses))


def request(*ids: int, rid: str = "r", **sampling: Any) -> ModelRequest:
    return ModelRequest(
        rid=rid, input_ids=list(ids), gconfig=GenerationHyperparameters(**{"max_new_tokens": 3} | sampling)
    )


def ask(engine: RemoteSGLangEngine, *requests: ModelRequest) -> list[ModelResponse]:
    workflow = Asks(*requests)
    engine.rollout_batch([{}], workflow)
    return workflow.responses


def in_turn(*replies):
    """A reply that acts as the first of `replies`, then the second, ...; the last one stays."""
    remaining = list(replies)

    async def reply(body, request):
        return await (remaining.pop(0) if len(remaining) > 1 else remaining[0])(body, request)

    return reply


async def in_full(body, request):
    return web.json_response(tokens_of(body))


async def fails_500(body, request):
    return web.Response(status=500, text="CUDA error")


async def drops(body, request):
    request.transport.abort()
    return web.Response()


async def hangs(body, request):
    await asyncio.sleep(3600)
    return web.Response()


def test_a_response_holds_tokens_logprobs_versions_and_the_reason(start_server, connect):
    (response,) = ask(connect(start_server()), request(4, 5))
    assert response == ModelResponse([4, 5], [6, 7, 8], [-0.06, -0.07, -0.08], [0, 0, 0], "length")


def test_a_group_travels_as_one_request_and_other_prompts_apart(start_server, connect):
    server = start_server()
    requests = [request(1), request(2), request(1, greedy=True), request(1)]
    responses = ask(connect(server), *requests)
    assert sorted(body["input_ids"] for body in server.bodies) == [[[1], [1], [1]], [[2]]]
    (group,) = [body for body in server.bodies if len(body["input_ids"]) == 3]
    assert [params["temperature"] for params in group["sampling_params"]] == [1.0, 0.0, 1.0]
    assert [r.input_tokens for r in responses] == [[1], [2], [1], [1]]
    assert [r.output_tokens[0] for r in responses] == [2, 3, 2, 2]


def test_the_callers_rid_is_not_sent_so_that_two_requests_may_share_one(start_server, connect):
    server = start_server()
    ask(connect(server), request(1, rid="same"), request(1, rid="same"))
    assert "same" not in json.dumps(server.bodies)


def test_5xx_is_tried_again_and_counted(start_server, connect):
    server = start_server(in_turn(fails_500, fails_500, in_full))
    engine = connect(server)
    stats_tracker.export()
    (response,) = ask(engine, request(1))
    assert response.output_tokens == [2, 3, 4]
    assert len(server.bodies) == 3
    assert stats_tracker.export()["rollout/retries"] == 2


def test_retries_are_bounded_and_the_last_failure_is_named(start_server, connect):
    server = start_server(fails_500)
    with pytest.raises(WorkflowError, match=rf"{server.address} answered 500: CUDA error; that was attempt 3 of 3"):
        ask(connect(server), request(1))
    assert len(server.bodies) == 3


def test_4xx_is_not_tried_again_and_its_body_is_in_the_error(start_server, connect):
    async def refuses(body, request):
        return web.json_response({"error": "input is longer than the context"}, status=400)

    server = start_server(refuses)
    with pytest.raises(WorkflowError, match=r"RequestRefused: .* answered 400: .*longer than the context"):
        ask(connect(server), request(1))
    assert len(server.bodies) == 1


def test_a_dropped_connection_is_tried_again_on_another_server(start_server, connect):
    bad, good = start_server(drops), start_server()
    engine = connect(bad, good)
    for i in range(1, 4):
        assert ask(engine, request(i))[0].output_tokens == [i + 1, i + 2, i + 3]
    assert len(bad.bodies) == len(good.bodies) == 3


def test_a_server_that_is_gone_is_named(start_server, connect):
    server = start_server()
    engine = connect(server)
    server.stop()
    with pytest.raises(WorkflowError, match=rf"the connection to {server.address} failed"):
        ask(engine, request(1))


def test_a_silent_server_meets_the_request_deadline_and_is_not_asked_again(start_server, connect):
    async def late(body, request):
        while True:  # until the client hangs up
            put_forward(engine._thread.loop, 700.0)
            await asyncio.sleep(0.05)

    server = start_server(late)
    engine = connect(server, request_timeout_s=600.0)
    with pytest.raises(WorkflowError, match=r"did not answer within rollout\.request_timeout_s=600 s"):
        ask(engine, request(1))
    assert len(server.bodies) == 1


def test_waiting_for_a_free_connection_does_not_count_as_waiting_for_the_server(start_server, connect):
    async def slow(body, request):
        put_forward(engine._thread.loop, 100.0)
        return web.json_response(tokens_of(body))

    engine = connect(start_server(slow), request_timeout_s=600.0, max_connections=1)
    assert len(ask(engine, *(request(i) for i in range(1, 31)))) == 30  # the last waits for 3000 s


def test_a_failed_episode_closes_the_connections_of_the_others(start_server, connect):
    server = start_server(hangs)

    class OneFails(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            if data["i"] == 0:
                while len(server.bodies) < 2:
                    await asyncio.sleep(0.01)
                raise RuntimeError("no reward")
            await asyncio.gather(engine.agenerate(request(data["i"])), engine.agenerate(request(data["i"])))

    with pytest.raises(WorkflowError, match="no reward"):
        connect(server).rollout_batch([{"i": i} for i in range(3)], OneFails())
    deadline = time.monotonic() + 300
    while server.cancelled < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.cancelled == 2


def test_the_least_loaded_server_is_asked(start_server, connect):
    first, second = start_server(hangs), start_server()

    class Loads(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            held = asyncio.gather(*(engine.agenerate(request(9)) for _ in range(4)))
            while not first.bodies:
                await asyncio.sleep(0.01)
            response = None
            for i in range(3):
                response = await engine.agenerate(request(i))
            held.cancel()
            return pad_responses([response], [0.0])

    connect(first, second).rollout_batch([{}], Loads())
    assert (len(first.bodies), len(second.bodies)) == (1, 3)


def test_an_aborted_completion_goes_on_after_all_its_tokens_but_the_last_with_their_versions(start_server, connect):
    async def aborts(body, request):
        return web.json_response([answer([7, 8, 0], version="3", reason="abort")])  # 0 would have ended it

    async def ends(body, request):
        return web.json_response([answer([9, 0], version="4", reason="stop")])

    server = start_server(in_turn(aborts, ends))
    engine = connect(server)
    stats_tracker.export()
    (response,) = ask(engine, request(5, 6, max_new_tokens=10, min_new_tokens=3))
    assert response == ModelResponse([5, 6], [7, 8, 9, 0], [-0.07, -0.08, -0.09, 0.0], [3, 3, 4, 4], "stop")
    assert [body["input_ids"] for body in server.bodies] == [[[5, 6]], [[5, 6, 7, 8]]]
    assert [body["sampling_params"][0]["max_new_tokens"] for body in server.bodies] == [10, 8]
    assert [body["sampling_params"][0]["min_new_tokens"] for body in server.bodies] == [3, 1]
    assert stats_tracker.export()["rollout/interruptions"] == 1


@pytest.mark.parametrize(
    "workflow",
    [
        Asks(*[request(4, max_new_tokens=6)] * 3),
        AsksGroups(request(4, max_new_tokens=6, n_samples=3)),
        AsksGroups(request(4, max_new_tokens=6, n_samples=2), request(4, max_new_tokens=6)),
    ],
)
def test_what_an_abort_leaves_of_a_group_goes_on_in_one_request(start_server, connect, workflow):
    async def aborts(body, request):
        ended = [answer([7, 0], reason="stop")]
        return web.json_response([answer([7, 3], reason="abort"), *ended, answer([8, 9, 3], reason="abort")])

    async def ends(body, request):
        return web.json_response([answer([5, 0], reason="stop"), answer([0], reason="stop")])

    server = start_server(in_turn(aborts, ends))
    connect(server).rollout_batch([{}], workflow)
    assert [response.output_tokens for response in workflow.responses] == [[7, 5, 0], [7, 0], [8, 9, 0]]
    assert [body["input_ids"] for body in server.bodies] == [[[4]] * 3, [[4, 7], [4, 8, 9]]]
    assert [params["max_new_tokens"] for params in server.bodies[1]["sampling_params"]] == [5, 4]


def test_a_completion_aborted_at_its_last_token_is_complete(start_server, connect):
    async def aborts(body, request):
        return web.json_response([answer([7, 8, 9], reason="abort")])

    server = start_server(aborts)
    stats_tracker.export()
    (response,) = ask(connect(server), request(5, max_new_tokens=3))
    assert (response.output_tokens, response.stop_reason, len(server.bodies)) == ([7, 8, 9], "length", 1)
    assert stats_tracker.export()["rollout/truncated"] == 1.0


def test_aborts_that_bring_no_token_are_bounded(start_server, connect):
    async def aborts(body, request):
        return web.json_response([{"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}])

    server = start_server(aborts)
    with pytest.raises(WorkflowError, match="aborted 3 times in a row without a new token"):
        ask(connect(server), request(5))
    assert len(server.bodies) == 3


def broken(**meta: Any) -> bytes:
    part = answer([4, 5])
    part["meta_info"] |= meta
    return json.dumps([part]).encode()


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"<html>busy</html>", "JSONDecodeError"),
        (b"{}", "0 completions instead of 1"),
        (b'[{"output_ids": [4]}]', "KeyError: 'meta_info'"),
        (broken(finish_reason={"type": "tired"}), "finish_reason 'tired'"),
        (broken(output_token_logprobs=[[-1.0, 4, None], 5]), "TypeError"),
        (broken(weight_versions=[{"version": "default", "start": 0, "end": 2}]), "'default' is not a number"),
    ],
)
def test_a_malformed_answer_is_an_error_that_shows_it(body, what):
    with pytest.raises(GenerationError, match=f"server:1 gave a malformed answer .*{what}") as caught:
        parse_answer(body, 1, "server:1")
    assert body[:10].decode() in str(caught.value)


@pytest.mark.parametrize(
    "meta",
    [
        {"output_token_logprobs": [[-1.0, 4, None]]},
        {"output_token_logprobs": [[-1.0, 4, None], [-1.0, 6, None]]},
        {"output_token_logprobs": [[-1.0, 4, None], [None, 5, None]]},
        {"weight_versions": [{"version": "0", "start": 0, "end": 1}]},
        {"weight_versions": [{"version": "0", "start": 1, "end": 2}]},
        {"weight_versions": [{"version": "0", "start": 1, "end": 3}]},
    ],
)
def test_a_completion_of_the_wrong_length_has_no_log_prob_and_leaves_the_others_of_its_group_alone(meta):
    bad, good = parse_answer(json.dumps([*json.loads(broken(**meta)), answer([7])]).encode(), 2, "server:1")
    assert len(bad.tokens) == len(bad.logprobs) == len(bad.versions) == 2
    assert any(map(math.isnan, bad.logprobs))
    assert (good.tokens, good.logprobs, good.versions) == ([7], [-0.07], [0])


def test_a_completion_over_two_versions_has_both():
    spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}]
    (part,) = parse_answer(broken(weight_versions=spans), 1, "server:1")
    assert part.versions == [6, 7]


def test_sampling_parameters_are_sglangs():
    gconfig = GenerationHyperparameters(
        max_new_tokens=8, temperature=0.7, top_p=0.9, top_k=5, stop=["\n"], stop_token_ids=[3]
    )
    assert sampling_params(gconfig) == {
        "max_new_tokens": 8,
        "min_new_tokens": 0,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["\n"],
        "stop_token_ids": [3],
    }
    assert sampling_params(gconfig.new(greedy=True), done=3)["temperature"] == 0.0
    assert sampling_params(gconfig, done=3)["max_new_tokens"] == 5


def test_without_addresses_the_remedy_is_named(monkeypatch):
    monkeypatch.delenv("MEGARL_LLM_SERVER_ADDRS", raising=False)
    with pytest.raises(UserError, match="set MEGARL_LLM_SERVER_ADDRS=host:port"):
        RemoteSGLangEngine(RolloutConfig()).initialize()


def test_addresses_come_from_the_environment(start_server, monkeypatch):
    servers = [start_server(), start_server()]
    monkeypatch.setenv("MEGARL_LLM_SERVER_ADDRS", f"http://{servers[0].address}/, {servers[1].address}")
    engine = RemoteSGLangEngine(RolloutConfig())
    engine.initialize()
    try:
        assert engine.addresses == [server.address for server in servers]
    finally:
        engine.destroy()


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (web.json_response({}, status=401), "refuses the API key; set MEGARL_LLM_SERVER_API_KEY"),
        (web.json_response({"weight_version": "default"}), "started with --weight-version 0"),
        (web.Response(text="hello"), "answers /model_info with 200 hello: it must be an SGLang server"),
        (web.Response(status=404), "answers /model_info with 404"),
    ],
)
def test_a_server_that_cannot_serve_is_refused_before_any_request(start_server, connect, info, message):
    with pytest.raises(UserError, match=message):
        connect(start_server(model_info=info))


def test_an_address_where_nothing_listens_is_refused(start_server, connect):
    server = start_server()
    server.stop()
    with pytest.raises(UserError, match=f"no SGLang server answers at {server.address}"):
        connect(server)


def test_the_engine_leaves_no_thread_and_can_be_initialized_again(start_server):
    server = start_server()
    engine = RemoteSGLangEngine(RolloutConfig())
    before = threading.active_count()
    for _ in range(2):
        engine.initialize([server.address])
        with pytest.raises(UserError, match="initialized already"):
            engine.initialize([server.address])
        ask(engine, request(1))
        engine.destroy()
        engine.destroy()
        assert threading.active_count() == before
    with pytest.raises(UserError, match="not initialized"):
        ask(engine, request(1))


def test_workflows_are_closed_though_an_episode_swallows_its_end(start_server, monkeypatch):
    class Watches:
        closed = False

        async def aclose(self):
            self.closed = True

    async def swallow():
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        await asyncio.sleep(600)

    monkeypatch.setattr(executor, "STOP_GRACE_S", 0.2)
    engine, workflow, begun = RemoteSGLangEngine(RolloutConfig()), Watches(), threading.Event()
    engine.initialize([start_server().address])
    engine._workflows.append(workflow)
    engine._thread.submit(swallow())
    assert begun.wait(300)
    with pytest.raises(TimeoutError):
        engine.destroy()
    assert workflow.closed


@pytest.mark.parametrize("knob", [{"max_connections": 0}, {"request_timeout_s": 0.0}, {"max_retries": -1}])
def test_a_knob_out_of_range_is_refused(knob):
    with pytest.raises(UserError, match=next(iter(knob))):
        RolloutConfig(**knob)


def test_the_version_is_the_one_last_set():
    engine = RemoteSGLangEngine(RolloutConfig())
    assert engine.get_version() == 0
    engine.set_version(7)
    assert engine.get_version() == 7
    assert torch.tensor(engine.get_version()) == 7
