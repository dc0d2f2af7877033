"""A workflow that a user writes against the public interface, by the calls of the AReaL documents, runs unchanged."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
import torch
from aiohttp import web
from fault_server import answer
from tensordict import TensorDict

from megarl import cli
from megarl.actor.api import FinetuneSpec
from megarl.data.tokenizer import load_hf_tokenizer
from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.config import RolloutConfig
from megarl.types import GenerationHyperparameters, ModelRequest, ModelResponse

QUESTION = {"messages": [{"role": "user", "content": "Leo has 7 pens. How many?"}], "answer": "#### 7"}


class ReMax(RolloutWorkflow):
    """One sampled completion against the greedy one; the difference of their rewards on every token."""

    def __init__(self, reward_fn: Any, gconfig: GenerationHyperparameters, tokenizer: Any) -> None:
        self.reward_fn, self.gconfig, self.tokenizer = reward_fn, gconfig, tokenizer

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        input_ids = self.tokenizer.apply_chat_template(
            data["messages"], tokenize=True, add_generation_prompt=True, enable_thinking=False
        )
        rid = uuid.uuid4().hex
        sampled, greedy = await asyncio.gather(
            engine.agenerate(ModelRequest(rid=rid, input_ids=input_ids, gconfig=self.gconfig)),
            engine.agenerate(ModelRequest(rid=rid, input_ids=input_ids, gconfig=self.gconfig.new(greedy=True))),
        )
        prompt = self.tokenizer.decode(input_ids)
        gain = self._reward(prompt, sampled, data) - self._reward(prompt, greedy, data)
        length = sampled.input_len + sampled.output_len
        res = {
            "input_ids": torch.tensor(sampled.input_tokens + sampled.output_tokens),
            "loss_mask": torch.tensor([0] * sampled.input_len + [1] * sampled.output_len),
            "versions": torch.tensor([-1] * sampled.input_len + sampled.output_versions),
            "attention_mask": torch.ones(length, dtype=torch.bool),
            "rewards": torch.tensor([float(gain)] * length),
        }
        return TensorDict({key: value.unsqueeze(0) for key, value in res.items()}, batch_size=[1])

    def _reward(self, prompt: str, response: ModelResponse, data: dict[str, Any]) -> float:
        text = self.tokenizer.decode(response.output_tokens)
        return self.reward_fn(
            prompt=prompt,
            completions=text,
            prompt_ids=response.input_tokens,
            completion_ids=response.output_tokens,
            **data,
        )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_hf_tokenizer(cli.ASSETS / "tiny")


def test_the_chat_template_of_a_loaded_tokenizer_gives_ids_that_it_can_read(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(QUESTION["messages"], tokenize=True, add_generation_prompt=True)
    assert all(isinstance(i, int) for i in ids)
    assert tokenizer.decode(ids) == "<|user|>Leo has 7 pens. How many?<|assistant|>"


def test_a_remax_workflow_by_the_documents_calls_runs(start_server: Any, tokenizer: Any, monkeypatch: Any) -> None:
    right, wrong = (tokenizer.encode(text) for text in ("#### 7", "#### 8"))

    async def reply(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return web.json_response(
            [answer(wrong if p["temperature"] == 0 else right, "5") for p in body["sampling_params"]]
        )

    def reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **_: Any) -> int:
        assert prompt.startswith("<|user|>Leo has")
        return int(completions == answer)

    server = start_server(reply)
    monkeypatch.setenv("MEGARL_LLM_SERVER_ADDRS", server.address)
    rollout = RemoteSGLangEngine(RolloutConfig())
    rollout.initialize(None, FinetuneSpec(1, 10, 1))
    try:
        workflow = ReMax(reward_fn, GenerationHyperparameters(max_new_tokens=8), tokenizer)
        batch = rollout.rollout_batch([QUESTION, QUESTION], workflow=workflow)
    finally:
        rollout.destroy()
    assert batch.num_seqs == 2
    assert batch["input_ids"][batch["loss_mask"]].tolist() == right * 2
    assert set(batch["versions"][batch["loss_mask"]].tolist()) == {5}
    assert batch["rewards"].tolist() == [1.0] * batch["rewards"].numel()  # right against the greedy one's wrong
