"""An episode that has ended asks the servers for nothing more, though its thread goes on."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from typing import Any

import openai
import pytest
import torch
from aiohttp import web
from transformers import AutoTokenizer

from megarl import cli
from megarl.rollout.executor import WorkflowError
from megarl.rollout.workflows.agent import AgentConfig, AgentWorkflow
from megarl.rollout.workflows.rollout_func import RolloutFuncWorkflow
from megarl.types import GenerationHyperparameters
from tests.clocks import put_forward
from tests.unit.rollout.test_supervisor import until
from tests.unit.rollout.test_together import Asks

GCONFIG = GenerationHyperparameters(n_samples=1, max_new_tokens=4)
DATA = {"messages": [{"role": "user", "content": "3 + 4 ="}]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(cli.ASSETS / "tiny")


def test_the_request_of_an_agent_that_is_out_of_time_is_cancelled(
    start_server: Any, connect: Any, tokenizer: Any
) -> None:
    async def hangs(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        put_forward(engine._thread.loop, 700.0)  # the agent is out of time
        await asyncio.sleep(3600)
        return web.Response()

    ended = threading.Event()

    def agent(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        try:
            client.chat.completions.create(model="policy", messages=data["messages"])
        finally:
            ended.set()
        return 1.0

    server = start_server(hangs)
    engine = connect(server, request_timeout_s=10_000.0)
    with pytest.raises(WorkflowError, match="no sample can be trained on: reward failed"):
        engine.rollout_batch([DATA], AgentWorkflow(agent, GCONFIG, tokenizer, AgentConfig(time_limit_s=600.0)))
    assert ended.wait(300)
    until(lambda: server.cancelled == 1)


def test_a_rollout_function_whose_episode_was_cancelled_asks_no_more(tokenizer: Any) -> None:
    engine, refused = Asks(), threading.Event()
    engine.begun = 2  # none of them is the one that fails

    def ask_twice(model: Any, processing_class: Any, prompts: Any, trainer: Any) -> list[str]:
        for _ in range(2):
            try:
                model.generate(torch.tensor([[1, 2]] * 2))
            except CancelledError:
                continue
        refused.set()
        return [""]

    async def cancelled() -> None:
        workflow = RolloutFuncWorkflow(ask_twice, lambda **_: 0.0, GCONFIG, tokenizer)
        episode = asyncio.ensure_future(workflow.arun_episode(engine, DATA))
        while engine.begun < 4:
            await asyncio.sleep(0.001)
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)
        while not refused.is_set():
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(cancelled(), 300))
    assert engine.cancelled == 2
    assert engine.begun == 4
