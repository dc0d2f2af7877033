"""The rollout client against a real SGLang server."""

from __future__ import annotations

import asyncio
import copy
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.observe.metrics import stats_tracker
from megarl.rollout.api import RolloutWorkflow
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.config import RolloutConfig
from megarl.rollout.evaluate import Evaluator, EvaluatorConfig
from megarl.rollout.executor import WorkflowError
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.rollout.transcript import pad_responses
from megarl.rollout.workflows.multi_turn import MultiTurnConfig, MultiTurnWorkflow
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.types import GenerationHyperparameters, ModelRequest, ModelResponse
from tests.unit.rollout.conversations import Exchange, assert_trained_once

EOS = 0
PROMPTS = [[40 + i, 50 + 2 * i, 60 + 3 * i, 70, 80 + i] for i in range(8)]


@pytest.fixture(scope="module")
def engine(server: SGLangServers) -> Iterator[RemoteSGLangEngine]:
    engine = RemoteSGLangEngine(RolloutConfig())
    engine.initialize(server.addresses, api_key=server.api_key)
    yield engine
    engine.destroy()


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen3"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Callable[..., Path]) -> Any:
    return AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3"))


class Asks(RolloutWorkflow):
    """One completion per request of `data["requests"]`, at once."""

    def __init__(self) -> None:
        self.responses: dict[int, list[ModelResponse]] = {}

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        responses = await asyncio.gather(*(engine.agenerate(request) for request in data["requests"]))
        self.responses[data["i"]] = responses
        return pad_responses(responses, [0.0] * len(responses))


def ask(engine: RemoteSGLangEngine, *requests: ModelRequest) -> list[ModelResponse]:
    workflow = Asks()
    engine.rollout_batch([{"i": 0, "requests": requests}], workflow)
    return workflow.responses[0]


def request(ids: list[int], **sampling: Any) -> ModelRequest:
    return ModelRequest(rid="same", input_ids=ids, gconfig=GenerationHyperparameters(**sampling))


def logprobs_of(model: torch.nn.Module, response: ModelResponse, temperature: float = 1.0) -> torch.Tensor:
    """The log-probs that transformers gives the response's output tokens."""
    ids = torch.tensor([response.input_tokens + response.output_tokens])
    with torch.no_grad():
        logprobs = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[response.input_len - 1 :, 0]


class Listening:
    """An engine that passes requests on and keeps each with its answer."""

    def __init__(self, engine: RemoteSGLangEngine) -> None:
        self.exchanges: list[Exchange] = []
        self.max_sequence_tokens = None
        self._engine = engine

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        response = await self._engine.agenerate(req)
        exchange = req.input_ids, response.output_tokens, response.output_logprobs, response.output_versions
        self.exchanges.append(Exchange(*exchange))
        return response


class Listens(RolloutWorkflow):
    """Runs another workflow on a `Listening` engine."""

    def __init__(self, workflow: RolloutWorkflow) -> None:
        self.workflow = workflow
        self.exchanges: list[Exchange] = []

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        listening: Any = Listening(engine)
        result = await self.workflow.arun_episode(listening, data)
        self.exchanges += listening.exchanges
        return result


@pytest.mark.parametrize(("template", "segments"), [("qwen3", 3), ("glm_4_5", 3), ("kept", 1)])
def test_answers_under_a_rewriting_template_have_the_log_probs_of_their_segments(
    engine, model, tokenizer, template, segments
):
    tokenizer = copy.deepcopy(tokenizer)
    if template == "kept":
        shown = "<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
        tokenizer.chat_template = "{% for m in messages %}" + shown + "{% endfor %}<|assistant|>"
    else:
        file = Path(__file__).parents[1] / f"unit/rollout/chat_templates/{template}.jinja"
        thinks = file.read_text(encoding="utf-8").replace("m.content", "(m.content ~ '</think>.')")  # GLM's name
        tokenizer.chat_template = thinks.replace(
            "set content = message.content", "set content = message.content ~ '</think>.'"
        )
    gconfig = GenerationHyperparameters(n_samples=3, max_new_tokens=8)
    workflow = Listens(MultiTurnWorkflow(lambda *_, **__: 0.0, gconfig, tokenizer, MultiTurnConfig(feedback="again")))
    batch = engine.rollout_batch([{"messages": [{"role": "user", "content": f"{i}?"}]} for i in range(3)], workflow)
    assert len(workflow.exchanges) == 3 * 3 * 3
    assert_trained_once(batch, workflow.exchanges)
    assert (batch.num_samples, batch.num_seqs) == (9, 9 * segments)
    ids, lengths = batch["input_ids"], batch.lengths.tolist()
    for row, mask, sampled in zip(
        ids.split(lengths), batch["loss_mask"].split(lengths), batch["rollout_logprobs"].split(lengths), strict=True
    ):
        with torch.no_grad():
            logprobs = model(row[None]).logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]
        assert (sampled[1:] - logprobs)[mask[1:]].abs().max() < 2e-5


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_rollout_logprobs_are_those_of_transformers(engine, model, temperature):
    responses = ask(
        engine, *(request(ids, max_new_tokens=24, temperature=temperature) for ids in PROMPTS for _ in "12")
    )
    for response in responses:
        expected = logprobs_of(model, response, temperature)
        assert (torch.tensor(response.output_logprobs) - expected).abs().max() < 2e-5


def test_greedy_tokens_are_those_of_transformers(engine, model):
    responses = ask(engine, *(request(ids, max_new_tokens=16, greedy=True) for ids in PROMPTS))
    for ids, response in zip(PROMPTS, responses, strict=True):
        expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=16, eos_token_id=EOS)
        assert response.output_tokens == expected[0, len(ids) :].tolist()
        assert response.input_tokens == ids


def test_samples_differ_within_a_group_and_the_prompt_is_cached(engine):
    responses = ask(engine, *[request(PROMPTS[0], max_new_tokens=12, min_new_tokens=6)] * 8)
    assert len({tuple(r.output_tokens) for r in responses}) == 8


def test_sampled_and_greedy_requests_of_one_rid_do_not_collide(engine):
    sampled = request(PROMPTS[1], max_new_tokens=12)
    greedy = ModelRequest(rid=sampled.rid, input_ids=sampled.input_ids, gconfig=sampled.gconfig.new(greedy=True))
    first, second = ask(engine, sampled, greedy), ask(engine, sampled, greedy)
    assert first[1].output_tokens == second[1].output_tokens
    assert first[0].output_tokens != second[0].output_tokens


def test_stop_reasons_and_the_eos_token(engine):
    full = ask(engine, request(PROMPTS[2], max_new_tokens=6, greedy=True))[0]
    assert (full.output_len, full.stop_reason) == (6, "length")
    stopped = ask(engine, request(PROMPTS[2], max_new_tokens=6, greedy=True, stop_token_ids=[full.output_tokens[3]]))[0]
    assert (stopped.output_tokens, stopped.stop_reason) == (full.output_tokens[:4], "stop")
    many = ask(engine, *[request(ids, max_new_tokens=400, temperature=3.0) for ids in PROMPTS for _ in range(8)])
    ended = [r for r in many if r.stop_reason == "stop"]
    assert ended
    assert all(r.output_tokens[-1] == EOS and EOS not in r.output_tokens[:-1] for r in ended)
    assert all(EOS not in r.output_tokens and r.output_len == 400 for r in many if r.stop_reason == "length")
    assert all(len(r.output_logprobs) == len(r.output_versions) == r.output_len for r in many)


def test_a_stop_string_ends_a_completion(engine, tokenizer):
    full = ask(engine, request(PROMPTS[3], max_new_tokens=12, greedy=True))[0]
    stop = next(text for token in full.output_tokens[5:] if (text := tokenizer.decode([token])).isprintable() and text)
    stopped = ask(engine, request(PROMPTS[3], max_new_tokens=12, greedy=True, stop=[stop]))[0]
    assert stopped.stop_reason == "stop"
    assert stopped.output_tokens == full.output_tokens[: stopped.output_len]
    assert stop in tokenizer.decode(stopped.output_tokens)


def test_groups_keep_the_order_of_the_prompts_when_the_last_ends_first(engine):
    data = [
        {"i": i, "requests": [request(ids, max_new_tokens=200 if i == 0 else 2)] * 2} for i, ids in enumerate(PROMPTS)
    ]
    batch = engine.rollout_batch(data, Asks())
    assert batch["group_ids"].tolist() == [i for i in range(8) for _ in "12"]
    starts = batch["cu_seqlens"][:-1].tolist()
    assert [batch["input_ids"][s : s + 5].tolist() for s in starts] == [ids for ids in PROMPTS for _ in "12"]
    assert (batch["versions"][batch["loss_mask"]] == 0).all()
    assert (batch["versions"][~batch["loss_mask"]] == -1).all()


def test_a_prompt_longer_than_the_context_is_refused_with_the_servers_words(engine):
    with pytest.raises(
        WorkflowError, match=r"RequestRefused: .*answered 400: .*longer than the model's context length"
    ):
        ask(engine, request([50] * 600, max_new_tokens=4))


def test_completions_aborted_by_a_pause_go_on_where_they_were(server, engine, model):
    def post(route: str, **body: Any) -> None:
        call = urllib.request.Request(
            f"http://{server.addresses[0]}/{route}",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {server.api_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(call, timeout=300) as response:
            assert response.status == 200

    interruptions = 0.0

    class IsPaused(Asks):
        async def arun_episode(self, engine, data):
            """Pauses until one has met completions under way: when they are is the machine's matter."""
            nonlocal interruptions
            asking = asyncio.create_task(super().arun_episode(engine, data))
            while not interruptions and not asking.done():
                await asyncio.sleep(0.1)
                await asyncio.to_thread(post, "pause_generation", mode="abort")
                await asyncio.to_thread(post, "continue_generation")
                interruptions += stats_tracker.export().get("rollout/interruptions", 0.0)
            return await asking

    stats_tracker.export()
    workflow = IsPaused()
    for _ in range(30):  # on a machine that stalls, completions may end before the first pause
        requests = [request(ids, max_new_tokens=450, greedy=True) for ids in PROMPTS]
        engine.rollout_batch([{"i": 0, "requests": requests}], workflow)
        interruptions += stats_tracker.export().get("rollout/interruptions", 0.0)
        if interruptions:
            break
    assert interruptions
    responses = workflow.responses[0]
    for response in responses:
        assert response.stop_reason in ("length", "stop")
        assert response.output_len == 450 or response.output_tokens[-1] == EOS
        expected = logprobs_of(model, response)
        assert (torch.tensor(response.output_logprobs) - expected).abs().max() < 2e-5


def test_a_workflow_may_compare_a_sampled_with_a_greedy_completion(engine):
    class AgainstGreedy(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            sample = request(PROMPTS[data["i"]], max_new_tokens=8)
            greedy = ModelRequest(rid=sample.rid, input_ids=sample.input_ids, gconfig=sample.gconfig.new(greedy=True))
            response, baseline = await asyncio.gather(engine.agenerate(sample), engine.agenerate(greedy))
            length = response.input_len + response.output_len
            reward = float(sum(response.output_logprobs) - sum(baseline.output_logprobs))
            return TensorDict(
                {
                    "input_ids": torch.tensor([response.input_tokens + response.output_tokens]),
                    "loss_mask": torch.tensor([[0] * response.input_len + [1] * response.output_len]),
                    "versions": torch.tensor([[-1] * response.input_len + response.output_versions]),
                    "attention_mask": torch.ones(1, length, dtype=torch.bool),
                    "rewards": torch.full((1, length), reward),
                },
                batch_size=[1],
            )

    batch = engine.rollout_batch([{"i": i} for i in range(4)], workflow=AgainstGreedy())
    assert batch.num_seqs == 4
    assert batch.tokens["rewards"].shape == (batch.total_tokens,)
    assert (batch["rewards"] < 0).any()
    assert [batch["input_ids"][s] for s in batch["cu_seqlens"][:-1]] == [PROMPTS[i][0] for i in range(4)]


def test_rlvr_and_the_evaluator_run_on_a_real_server(engine, tokenizer, tmp_path):
    problems = [{"messages": [{"role": "user", "content": f"Leo has {i} pens."}], "parity": i % 2} for i in range(6)]

    def reward_fn(prompt, completions, prompt_ids, completion_ids, parity, **data):
        assert completions == tokenizer.decode(completion_ids, skip_special_tokens=True)
        return float(len(completion_ids) == 4 and parity)

    config = EvaluatorConfig(n_samples=2, temperature=0.5)
    workflow = RLVRWorkflow(reward_fn, config.sampling(GenerationHyperparameters(max_new_tokens=4)), tokenizer)
    evaluation = Evaluator(config, workflow, problems, tokenizer, tmp_path).evaluate(engine, 0)
    assert (evaluation.num_problems, evaluation.num_samples) == (6, 12)
    lines = [json.loads(line) for line in evaluation.path.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [p["messages"][0]["content"] for p in problems for _ in "12"]
    assert sum(line["reward"] for line in lines) / 12 == pytest.approx(evaluation.accuracy)
    assert {tuple(line["versions"]) for line in lines} == {(0,)}
