"""Workflows of several turns, tools and rollout functions, on a server that answers from a script."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from conversations import DATA, GCONFIG, reward_of_seven, sequences

from megarl.data.tokenizer import train_tokenizer
from megarl.knobs import UserError
from megarl.rollout.transcript import MIN_ANSWER, Transcript, pad_transcripts, prompt_ids, turn_ids
from megarl.rollout.workflows.multi_turn import MultiTurnConfig, MultiTurnWorkflow
from megarl.rollout.workflows.remax import ReMaxRLVRWorkflow
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.rollout.workflows.rollout_func import RolloutFuncWorkflow
from megarl.rollout.workflows.tool_use import ToolUseConfig, ToolWorkflow
from megarl.rollout.workflows.tools import Tool, calculator_tool, python_tool, search_tool
from megarl.types import ModelRequest, ModelResponse, Reward


def test_remax_takes_the_greedy_completions_reward_off(say: Any, tokenizer: Any) -> None:
    greedy_requests: list[bool] = []
    for greedy_right in (True, False):
        greedy_requests.clear()

        def scripted(prompt: str, params: dict[str, Any], right: bool = greedy_right) -> str:
            is_greedy = params["temperature"] == 0 or params.get("top_k") == 1
            greedy_requests.append(is_greedy)
            return "7" if is_greedy == right else "8"

        workflow = ReMaxRLVRWorkflow(reward_of_seven, GCONFIG.new(n_samples=3), tokenizer)
        batch = say(scripted).rollout_batch([DATA], workflow)
        assert batch["rewards"].tolist() == [-1.0 if greedy_right else 1.0] * 3
        assert sorted(greedy_requests) == [False] * 3 + [True]


def test_a_second_try_is_discounted_and_both_answers_are_trained_on(say: Any, tokenizer: Any) -> None:
    engine = say(lambda prompt, _: "7" if "again" in prompt else "3")
    workflow = MultiTurnWorkflow(
        reward_of_seven, GCONFIG, tokenizer, MultiTurnConfig(turn_discount=0.5, feedback="again")
    )
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

    batch = say(wrong).rollout_batch(
        [DATA], MultiTurnWorkflow(reward_of_seven, GCONFIG, tokenizer, MultiTurnConfig(max_turns=3))
    )
    assert len(prompts) == 3
    assert batch["rewards"].tolist() == [0.0]
    batch = say(lambda *_: "7").rollout_batch([DATA], MultiTurnWorkflow(reward_of_seven, GCONFIG, tokenizer))
    assert batch["rewards"].tolist() == [1.0]
    assert int(batch["loss_mask"].sum()) == 2


def test_the_parts_of_a_weighted_reward_are_discounted_with_it(say: Any, tokenizer: Any) -> None:
    def two_rewards(prompt: str, completions: str, *_: Any, **data: Any) -> Reward:
        right = float(completions.strip() == "7")
        return Reward(right + 0.5 * right, [right, right])

    engine = say(lambda prompt, _: "7" if "again" in prompt else "3")
    config = MultiTurnConfig(turn_discount=0.5, feedback="again")
    batch = engine.rollout_batch([DATA], MultiTurnWorkflow(two_rewards, GCONFIG, tokenizer, config))
    assert batch["rewards"].tolist() == [0.75]
    assert batch["reward_columns"].tolist() == [[0.5, 0.5]]


def test_a_conversation_ends_where_the_sequence_is_full(say: Any, tokenizer: Any) -> None:
    def wrong(prompt: str, params: dict[str, Any]) -> str:
        limits.append(params["max_new_tokens"])
        return "3"

    limits: list[int] = []
    engine = say(wrong)
    workflow = MultiTurnWorkflow(reward_of_seven, GCONFIG, tokenizer, MultiTurnConfig(max_turns=9))
    question = len(prompt_ids(tokenizer, DATA["messages"]))  # type: ignore[arg-type]
    turn = len(turn_ids(tokenizer, [0], [{"role": "user", "content": workflow.config.feedback}]))
    engine.max_sequence_tokens = question + 2 + turn + MIN_ANSWER
    batch = engine.rollout_batch([DATA], workflow)
    assert limits == [2 + turn + MIN_ANSWER, MIN_ANSWER]
    assert batch["rewards"].tolist() == [0.0]
    assert batch.lengths.tolist() == [question + 2 + turn + 2]
    engine.max_sequence_tokens = question
    with pytest.raises(UserError, match=rf"a prompt has {question} tokens of at most {question} in a sequence"):
        engine.rollout_batch([DATA], workflow)


def test_an_answer_that_fits_is_asked_for_however_short_it_may_be() -> None:
    request = Transcript().ask([1] * 64, GCONFIG.new(max_new_tokens=4), 68)
    assert request is not None
    assert request.gconfig.max_new_tokens == 4
    assert Transcript().ask([1] * 65, GCONFIG.new(max_new_tokens=4), 68) is None


def test_a_longer_sequence_than_servers_and_trainer_take_is_left_out(say: Any, tokenizer: Any) -> None:
    engine = say(lambda *_: "7")
    engine.max_sequence_tokens = 20
    question = {"messages": [{"role": "user", "content": "Leo has 7 pens. " * 5}], "answer": "7"}
    engine.rollout_batch([DATA, question], RLVRWorkflow(reward_of_seven, GCONFIG, tokenizer))
    assert [episode.dropped for episode in engine.episodes] == [{}, {"more than 20 tokens": 1}]


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

    workflow = ToolWorkflow(reward_of_seven, GCONFIG, tokenizer)
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
        ('{"name": ["calculator"], "arguments": {}}', "error: there is no tool"),
        ('{"name": "calculator", "arguments": {"expression": "6*7"}}', "42"),
        ('{"name": "broken", "arguments": {}}', "error: KeyError: 'x'"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_with_why(tokenizer: Any, text: str, says: str) -> None:
    broken = Tool("broken", "Fails.", {}, lambda: {}["x"])
    workflow = ToolWorkflow(reward_of_seven, GCONFIG, tokenizer, tools=[calculator_tool(), broken])
    assert workflow.call(text).startswith(says)


def test_a_result_is_cut_to_its_limit(tokenizer: Any) -> None:
    workflow = ToolWorkflow(reward_of_seven, GCONFIG, tokenizer, ToolUseConfig(max_result_chars=3))
    assert workflow.call('{"name": "calculator", "arguments": {"expression": "123456"}}') == "123"


def test_a_template_that_does_not_describe_tools_is_warned_about(tokenizer: Any, caplog: Any) -> None:
    ToolWorkflow(reward_of_seven, GCONFIG, tokenizer)
    assert "the chat template does not describe tools to the model" in caplog.text
    caplog.clear()
    other = train_tokenizer()
    other.chat_template = "{{ tools | tojson }}" + str(other.chat_template)
    ToolWorkflow(reward_of_seven, GCONFIG, other)
    assert not caplog.text


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


@pytest.mark.parametrize(
    ("texts", "message"),
    [(["a"], r"must return 2 strings, one a prompt; it returned 1 \(str\)"), (["a", 7], r"it returned 2 \(int, str\)")],
)
def test_a_rollout_function_that_returns_anything_but_a_text_a_prompt_is_told(
    texts: list[Any], message: str, say: Any, tokenizer: Any
) -> None:
    workflow = RolloutFuncWorkflow(lambda *_: texts, reward_of_seven, GCONFIG.new(n_samples=2), tokenizer)
    with pytest.raises(UserError, match=message):
        say(lambda *_: "7").rollout_batch([DATA], workflow)


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
