"""Agents on the local endpoint: their conversations are recorded token by token, and their failures counted."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from conversations import DATA, GCONFIG, sequences
from fault_server import answer

from megarl.knobs import UserError
from megarl.rollout.api import GenerationError
from megarl.rollout.executor import WorkflowError
from megarl.rollout.transcript import MIN_ANSWER, prompt_ids
from megarl.rollout.workflows.agent import AgentConfig, AgentWorkflow, agent_of
from tests.clocks import put_forward


class Post:
    """One POST to the endpoint, with a client of its own."""

    def __init__(self, url: str, body: dict[str, Any], key: str) -> None:
        self.url, self.body, self.key = url, body, key

    async def __aenter__(self) -> aiohttp.ClientResponse:
        self.client = aiohttp.ClientSession()
        return await self.client.post(self.url, json=self.body, headers={"Authorization": f"Bearer {self.key}"})

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()


def test_an_agent_without_a_function_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout\.workflow=agent needs rollout\.agent\.function=MODULE\.FUNCTION"):
        agent_of(AgentConfig())


def test_an_agent_by_openais_client_is_recorded_token_by_token(say: Any, tokenizer: Any) -> None:
    def agent(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages: list[Any] = list(data["messages"])
        for turn in ("again", None):
            reply = client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            if turn:
                messages.append({"role": "user", "content": turn})
        other = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "And you?"}])
        assert other.usage is not None
        return float(messages[-1]["content"] == "7")

    engine = say(lambda prompt, _: "7" if "again" in prompt else " 3 3")
    workflow = AgentWorkflow(agent, GCONFIG, tokenizer)
    batch = engine.rollout_batch([DATA], workflow)
    assert batch["rewards"].tolist() == [1.0, 1.0]
    eos = tokenizer.eos_token
    (whole, trained), (second, _) = sequences(batch, tokenizer)
    assert whole == f"<|user|>Leo has 7 pens.<|assistant|> 3 3{eos}<|user|>again<|assistant|>7{eos}"
    assert trained == f" 3 3{eos}7{eos}"
    assert second.startswith("<|user|>And you?")


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"stream": True}, 400, "stream=true"),
        ({"n": 2}, 400, "n must be 1"),
        ({"temperature": 0.3}, 400, "temperature must be"),
        ({"top_p": 0.3}, 400, "top_p must be"),
        ({"tools": [{"type": "function"}]}, 400, "tools are not served"),
        ({"max_tokens": "many"}, 400, "max_tokens='many' must be a number"),
        ({"messages": None}, 400, "no chat completion request"),
        ({"key": "stolen"}, 401, "belongs to no episode"),
    ],
)
def test_the_agents_endpoint_refuses_what_would_not_be_the_policys(
    say: Any, tokenizer: Any, change: dict[str, Any], status: int, says: str
) -> None:
    seen = []

    async def agent(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        body = {"messages": data["messages"], **change}
        headers = {"Authorization": f"Bearer {body.pop('key', api_key)}"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{base_url}/chat/completions", json=body, headers=headers) as reply,
        ):
            seen.append((reply.status, (await reply.json())["error"]["message"]))
        async with client_of(base_url, api_key, data) as good:
            assert good.status == 200
        return 1.0

    def client_of(base_url: str, api_key: str, data: dict[str, Any]) -> Any:
        return Post(f"{base_url}/chat/completions", {"messages": data["messages"]}, api_key)

    say(lambda *_: "7").rollout_batch([DATA], AgentWorkflow(agent, GCONFIG, tokenizer))
    assert seen[0][0] == status
    assert says in seen[0][1]


def test_what_an_agent_that_fails_had_is_left_out(say: Any, tokenizer: Any) -> None:
    async def agent(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        async with Post(f"{base_url}/chat/completions", {"messages": data["messages"]}, api_key):
            pass
        if not seen:
            seen.append(1)
            raise RuntimeError("lost")
        return 1.0

    seen: list[int] = []
    batch = say(lambda *_: "7").rollout_batch([DATA], AgentWorkflow(agent, GCONFIG.new(n_samples=2), tokenizer))
    assert batch["rewards"].tolist() == [1.0]
    assert batch.num_seqs == 1


def test_an_agent_that_never_asks_is_counted_and_stops_the_run_instead_of_being_asked_for_ever(
    say: Any, tokenizer: Any, caplog: Any
) -> None:
    def broken(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        return data["no such column"]

    def idle(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        return 1.0

    engine = say(lambda *_: "7")
    for agent, cause in ((broken, "KeyError: 'no such column'"), (idle, "it asked for no completion")):
        with pytest.raises(WorkflowError, match=r"no sample can be trained on: reward failed \(2\)"):
            engine.rollout_batch([DATA], AgentWorkflow(agent, GCONFIG.new(n_samples=2), tokenizer))
        assert f"the agent {agent.__name__} failed: {cause}" in caplog.text


@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_an_agent_that_hangs_or_exits_costs_its_own_sample(say: Any, tokenizer: Any, caplog: Any, kind: str) -> None:
    released = threading.Event()
    runs: list[int] = []
    ended: list[int] = []

    async def last_hangs(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        async with Post(f"{base_url}/chat/completions", {"messages": data["messages"]}, api_key):
            runs.append(1)
            number = len(runs)
        if number < 3:
            ended.append(number)
            return 1.0
        while len(ended) < 2:
            await asyncio.sleep(0.01)
        put_forward(engine._thread.loop, 700.0)
        await asyncio.sleep(3600)
        return 1.0

    def first_hangs_second_exits(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        client.chat.completions.create(model="policy", messages=data["messages"])
        runs.append(1)
        if len(runs) == 1:
            put_forward(engine._thread.loop, 700.0)
            released.wait(300)
        if len(runs) == 2:
            raise SystemExit(3)
        return 1.0

    agent = last_hangs if kind == "async" else first_hangs_second_exits
    # One thread: the second run starts when the first one's time is up, and has all of its own time.
    config = AgentConfig(time_limit_s=600.0, max_threads=1)
    workflow = AgentWorkflow(agent, GCONFIG.new(n_samples=3), tokenizer, config)
    engine = say(lambda *_: "7")
    try:
        batch = engine.rollout_batch([DATA], workflow)
    finally:
        released.set()
    assert batch["rewards"].tolist() == [1.0] * (2 if kind == "async" else 1)
    assert "it took longer than rollout.agent.time_limit_s=600" in caplog.text
    assert ("SystemExit(3)" in caplog.text) == (kind == "sync")


def test_a_conversation_that_is_full_is_refused_and_what_there_is_of_it_trained_on(say: Any, tokenizer: Any) -> None:
    refusals: list[str] = []

    def agent(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages: list[Any] = list(data["messages"])
        while True:
            try:
                reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
            except openai.BadRequestError as error:
                refusals.append(error.message)
                return 1.0
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, *data["messages"]]

    engine = say(lambda *_: "7")
    question = len(prompt_ids(tokenizer, DATA["messages"]))  # type: ignore[arg-type]
    engine.max_sequence_tokens = 2 * (question + 2) + MIN_ANSWER
    batch = engine.rollout_batch([DATA], AgentWorkflow(agent, GCONFIG, tokenizer))
    assert "no room for an answer" in refusals[0]
    ((whole, trained),) = sequences(batch, tokenizer)
    assert trained.count("7") == whole.count("<|assistant|>") == 2


def test_servers_that_fail_under_an_agent_fail_the_episode_and_not_the_agents_sample(
    start_server: Any, connect: Any, tokenizer: Any
) -> None:
    async def fails(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return web.Response(status=500, text="CUDA error")

    def agent(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        client.chat.completions.create(model="policy", messages=data["messages"])
        return 1.0

    with pytest.raises(WorkflowError, match="answered 500: CUDA error") as caught:
        connect(start_server(fails)).rollout_batch([DATA], AgentWorkflow(agent, GCONFIG, tokenizer))
    assert isinstance(caught.value.__cause__, GenerationError)  # upon it the stream runs the prompt again


def test_the_endpoint_and_its_requests_end_with_the_engine(start_server: Any, connect: Any, tokenizer: Any) -> None:
    begun = threading.Event()
    urls: list[str] = []
    ended: list[str] = []

    async def hangs(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        begun.set()
        await asyncio.sleep(3600)
        return web.json_response([answer([7])])

    def agent(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        urls.append(base_url)
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        try:
            client.chat.completions.create(model="policy", messages=data["messages"])
        except openai.APIError as error:
            ended.append(type(error).__name__)
            raise
        return 1.0

    class Loader:
        batch_size = 1

        def __iter__(self) -> Any:
            return iter([[DATA]])

    threads_before = threading.enumerate()
    server = start_server(hangs)
    engine = connect(server, batch_timeout_s=10.0)
    loader, workflow = Loader(), AgentWorkflow(agent, GCONFIG, tokenizer)
    for _ in range(30):  # waits, as many as a busy machine takes to begin
        with pytest.raises(TimeoutError):
            engine.prepare_batch(loader, workflow)
        if begun.is_set():
            break
    assert begun.is_set()
    engine.destroy()
    host, port = urls[0].removeprefix("http://").removesuffix("/v1").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5)
    deadline = time.monotonic() + 300
    while not ended or any(t.name == "agent" and t not in threads_before for t in threading.enumerate()):
        assert time.monotonic() < deadline, "the agent's thread still waits"
        time.sleep(0.05)
    assert len(urls) == 1  # no other episode was started meanwhile


def test_a_workflow_may_be_closed_and_used_again(say: Any, tokenizer: Any) -> None:
    async def agent(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        async with Post(f"{base_url}/chat/completions", {"messages": data["messages"]}, api_key) as reply:
            return float(reply.status == 200)

    workflow = AgentWorkflow(agent, GCONFIG, tokenizer)
    for _ in range(2):
        engine = say(lambda *_: "7")
        assert engine.rollout_batch([DATA], workflow)["rewards"].tolist() == [1.0]
        engine.destroy()
