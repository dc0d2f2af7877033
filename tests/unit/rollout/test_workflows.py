"""Workflows of several turns, tools, agents and rollout functions, on a server that says what it is told.

The server answers from a script: given the text of the prompt, a function returns the completion's text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest
import torch
from aiohttp import web
from fault_server import answer

from megarl.data.tokenizer import train_tokenizer
from megarl.knobs import UserError
from megarl.rollout.transcript import Transcript, pad_transcripts, prompt_ids, turn_ids
from megarl.rollout.workflows.agent import AgentWorkflow
from megarl.rollout.workflows.multi_turn import MultiTurnWorkflow
from megarl.rollout.workflows.remax import ReMaxRLVRWorkflow
from megarl.rollout.workflows.rollout_func import RolloutFuncWorkflow
from megarl.rollout.workflows.tool_use import ToolWorkflow
from megarl.rollout.workflows.tools import calculator_tool, python_tool, search_tool
from megarl.types import GenerationHyperparameters, ModelRequest, ModelResponse

GCONFIG = GenerationHyperparameters(n_samples=1, max_new_tokens=64)
DATA = {"messages": [{"role": "user", "content": "Leo has 7 pens."}], "answer": "7"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer()


@pytest.fixture
def say(start_server: Any, connect: Any, tokenizer: Any) -> Callable[..., Any]:
    """`say(script)`: an engine whose server answers `script(prompt_text, sampling_params)`, ended with eos."""

    def make(script: Callable[[str, dict[str, Any]], str]) -> Any:
        async def reply(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
            asked = zip(body["input_ids"], body["sampling_params"], strict=True)
            texts = [script(tokenizer.decode(ids), params) for ids, params in asked]
            return web.json_response(
                [answer([*tokenizer.encode(text), tokenizer.eos_token_id], reason="stop") for text in texts]
            )

        return connect(start_server(reply))

    return make


def reward_of_seven(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    return float(completions.strip() == data["answer"])


def sequences(batch: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """Of every sequence the whole text and the text that is trained on."""
    parts = zip(
        batch["input_ids"].split(batch.lengths.tolist()), batch["loss_mask"].split(batch.lengths.tolist()), strict=True
    )
    return [(tokenizer.decode(ids), tokenizer.decode(ids[mask])) for ids, mask in parts]


def test_remax_takes_the_greedy_completions_reward_off(say: Any, tokenizer: Any) -> None:
    asked: list[bool] = []
    for greedy_right in (True, False):
        asked.clear()

        def scripted(prompt: str, params: dict[str, Any], right: bool = greedy_right) -> str:
            is_greedy = params["temperature"] == 0 or params.get("top_k") == 1
            asked.append(is_greedy)
            return "7" if is_greedy == right else "8"

        workflow = ReMaxRLVRWorkflow(reward_of_seven, GCONFIG.new(n_samples=3), tokenizer)
        batch = say(scripted).rollout_batch([DATA], workflow)
        assert batch["rewards"].tolist() == [-1.0 if greedy_right else 1.0] * 3
        assert sorted(asked) == [False] * 3 + [True]


def test_a_second_try_is_discounted_and_both_answers_are_trained_on(say: Any, tokenizer: Any) -> None:
    engine = say(lambda prompt, _: "7" if "again" in prompt else "3")
    workflow = MultiTurnWorkflow(reward_of_seven, GCONFIG, tokenizer, turn_discount=0.5, feedback="again")
    batch = engine.rollout_batch([DATA], workflow)
    assert batch["rewards"].tolist() == [0.5]
    ((whole, trained),) = sequences(batch, tokenizer)
    eos = tokenizer.eos_token
    assert whole == f"<|user|>Leo has 7 pens.<|assistant|>3{eos}<|user|>again<|assistant|>7{eos}"
    assert trained == f"3{eos}7{eos}"
    as_chat = tokenizer.apply_chat_template(
        [*DATA["messages"], {"role": "assistant", "content": "3"}, {"role": "user", "content": "again"}],  # type: ignore[misc]
        add_generation_prompt=True,
        return_dict=False,
    )
    assert batch["input_ids"][: len(as_chat)].tolist() == as_chat


def test_turns_end_at_their_limit_and_at_a_good_answer(say: Any, tokenizer: Any) -> None:
    prompts = []

    def wrong(prompt: str, _: dict[str, Any]) -> str:
        prompts.append(prompt)
        return "3"

    batch = say(wrong).rollout_batch([DATA], MultiTurnWorkflow(reward_of_seven, GCONFIG, tokenizer, max_turns=3))
    assert len(prompts) == 3
    assert batch["rewards"].tolist() == [0.0]
    batch = say(lambda *_: "7").rollout_batch([DATA], MultiTurnWorkflow(reward_of_seven, GCONFIG, tokenizer))
    assert batch["rewards"].tolist() == [1.0]
    assert int(batch["loss_mask"].sum()) == 2


def test_an_answer_cut_off_gets_its_end_of_turn_before_the_next(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "again"}]
    ended = turn_ids(tokenizer, [5, tokenizer.eos_token_id], turns)
    cut = turn_ids(tokenizer, [5, 6], turns)
    assert cut == [tokenizer.eos_token_id, *ended]


def test_a_template_that_drops_answers_is_refused(tokenizer: Any) -> None:
    other = train_tokenizer()
    other.chat_template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="leaves out earlier answers"):
        turn_ids(other, [], [{"role": "user", "content": "x"}])


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_are_called_and_their_results_read_but_not_trained_on(say: Any, tokenizer: Any) -> None:
    def script(prompt: str, _: dict[str, Any]) -> str:
        return "7" if prompt.endswith("<|user|>7<|assistant|>") else "I ask. " + call("calculator", expression="3+4")

    workflow = ToolWorkflow(reward_of_seven, GCONFIG, tokenizer, [calculator_tool()])
    assert workflow.role == "user"  # the bundled template has no tool role
    batch = say(script).rollout_batch([DATA], workflow)
    assert batch["rewards"].tolist() == [1.0]
    ((whole, trained),) = sequences(batch, tokenizer)
    eos = tokenizer.eos_token
    assert whole.endswith(f"</tool_call>{eos}<|user|>7<|assistant|>7{eos}")
    assert trained == f"I ask. {call('calculator', expression='3+4')}{eos}7{eos}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no json", "error: a call is"),
        ("[1]", "error: a call is"),
        ('{"name": "fly", "arguments": {}}', "error: there is no tool fly; there are calculator"),
        ('{"name": "calculator", "arguments": {}}', "error: calculator takes expression"),
        ('{"name": "calculator", "arguments": {"expression": "1", "x": "2"}}', "error: calculator takes expression"),
        ('{"name": "calculator", "arguments": {"expression": "6*7"}}', "42"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_with_why(tokenizer: Any, text: str, says: str) -> None:
    workflow = ToolWorkflow(reward_of_seven, GCONFIG, tokenizer, [calculator_tool()])
    assert workflow.call(text).startswith(says)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2*3", "7"),
        ("(1+2)**3 / 2", "13.5"),
        ("-7 // 2", "-4"),
        ("10 % 4", "2"),
        ("1/0", "error"),
        ("9**9**9", "error"),
        ("9**9**9**9**9", "error"),
        ("2**99999", "error"),
        ("__import__('os')", "error"),
        ("(lambda: 1)()", "error"),
        ("'a' * 9", "error"),
        ("True + 1", "error"),
        ("(-8) ** 0.5", "error"),
        ("(" * 150 + "1" + ")" * 150, "error"),
        ("1+", "error"),
    ],
)
def test_the_calculator_computes_and_never_executes(expression: str, value: str) -> None:
    assert calculator_tool().run(expression=expression).startswith(value)


def test_the_python_tool_prints_or_says_what_went_wrong() -> None:
    tool = python_tool(time_limit_s=10.0)
    assert tool.run(code="print(6 * 7)") == "42\n"
    assert tool.run(code="print(1)\n1/0") == "1\nZeroDivisionError: division by zero"
    assert "Operation not permitted" in tool.run(code="import socket; socket.socket()")
    assert python_tool(time_limit_s=1.0).run(code="while True: pass") == "stopped: time limit"


def test_the_search_tool_finds_the_passage_with_the_rare_words() -> None:
    tool = search_tool(["the cat sat on the mat", "the dog ran", "a whale in the sea"], results=1)
    assert tool.run(query="the whale") == "a whale in the sea"
    assert tool.run(query="zebra") == "nothing found"


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
        return _Post(f"{base_url}/chat/completions", {"messages": data["messages"]}, api_key)

    say(lambda *_: "7").rollout_batch([DATA], AgentWorkflow(agent, GCONFIG, tokenizer))
    assert seen[0][0] == status
    assert says in seen[0][1]


class _Post:
    """One POST with its client around it."""

    def __init__(self, url: str, body: dict[str, Any], key: str) -> None:
        self.url, self.body, self.key = url, body, key

    async def __aenter__(self) -> aiohttp.ClientResponse:
        self.client = aiohttp.ClientSession()
        return await self.client.post(self.url, json=self.body, headers={"Authorization": f"Bearer {self.key}"})

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()


def test_what_an_agent_that_fails_had_is_left_out(say: Any, tokenizer: Any) -> None:
    async def agent(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        async with _Post(f"{base_url}/chat/completions", {"messages": data["messages"]}, api_key):
            pass
        if not seen:
            seen.append(1)
            raise RuntimeError("lost")
        return 1.0

    seen: list[int] = []
    batch = say(lambda *_: "7").rollout_batch([DATA], AgentWorkflow(agent, GCONFIG.new(n_samples=2), tokenizer))
    assert batch["rewards"].tolist() == [1.0]
    assert batch.num_seqs == 1


def test_a_rollout_function_drives_the_model_and_returns_texts(say: Any, tokenizer: Any) -> None:
    def rollout_func(model: Any, processing_class: Any, prompts: list[Any], generation_config: Any) -> list[str]:
        texts = []
        for prompt in prompts:
            text = processing_class.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
            inputs = processing_class(text, return_tensors="pt").to(model.device)
            output = model.generate(**inputs, max_new_tokens=8)
            new = output[0][inputs.input_ids.shape[1] :]
            texts.append(processing_class.decode(new, skip_special_tokens=True))
        return texts

    batch = say(lambda *_: "7").rollout_batch(
        [DATA], RolloutFuncWorkflow(rollout_func, reward_of_seven, GCONFIG.new(n_samples=2), tokenizer)
    )
    assert batch["rewards"].tolist() == [1.0, 1.0]
    assert "rollout_logprobs" not in batch
    assert sequences(batch, tokenizer)[0][1] == f"7{tokenizer.eos_token}"


def test_a_request_takes_what_a_tokenizer_returns_for_ids(tokenizer: Any) -> None:
    encoded = tokenizer.apply_chat_template(DATA["messages"], tokenize=True, add_generation_prompt=True)
    assert ModelRequest(input_ids=encoded).input_ids == prompt_ids(tokenizer, DATA["messages"])  # type: ignore[arg-type]


def test_given_tokens_are_neither_trained_on_nor_versioned() -> None:
    transcript = Transcript()
    transcript.give([1, 2])
    transcript.sample(ModelResponse([1, 2], [3, 4], [-0.5, -0.25], [6, 7]))
    transcript.give([5])
    other = transcript.copy()
    other.sample(ModelResponse([], [6], [-1.0], [8]))
    padded = pad_transcripts([transcript, other], [1.0, 0.0])
    assert padded["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 6]]
    assert padded["loss_mask"].int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1]]
    assert padded["versions"].tolist() == [[-1, -1, 6, 7, -1, -1], [-1, -1, 6, 7, -1, 8]]
    assert torch.equal(padded["attention_mask"].sum(1), torch.tensor([5, 6]))
