"""Conversations under templates that rewrite them: what is trained on is what the server was asked, token for token."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from aiohttp import web
from conversations import DATA, GCONFIG, Exchange, assert_trained_once, reward_of_seven
from fault_server import answer
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.tokenizer import train_tokenizer
from megarl.observe.metrics import stats_tracker
from megarl.rollout.conversation import MANY_REWRITES, ChatTemplate, Conversation
from megarl.rollout.executor import pack
from megarl.rollout.transcript import pad_samples
from megarl.rollout.workflows.agent import AgentWorkflow
from megarl.rollout.workflows.multi_turn import MultiTurnConfig, MultiTurnWorkflow
from megarl.rollout.workflows.tool_use import ToolWorkflow
from megarl.types import ModelResponse
from tests.fuzzing import fuzzed

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL = {
    "qwen3": ["<|im_end|>", "<|im_start|>"],  # the first is the end of a sequence
    "glm_4_5": ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "deepseek_r1_distill": ["<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "3+4"}}</tool_call>'


@functools.cache
def small_tokenizer() -> Any:
    return train_tokenizer()


def tokenizer_of(name: str) -> Any:
    """A small tokenizer with a model's chat template and special tokens."""
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[name]})
    tokenizer.eos_token = SPECIAL[name][0]
    if name == "deepseek_r1_distill":
        tokenizer.bos_token = SPECIAL[name][1]
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


class Talk:
    """An engine whose server gives `answers` in turn; keeps each request with its answer."""

    def __init__(self, start_server: Any, connect: Any, tokenizer: Any, answers: Callable[[str], str]) -> None:
        self.exchanges: list[Exchange] = []
        self.prompts: list[str] = []

        async def reply(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
            said = [self._say(ids, tokenizer, answers) for ids in body["input_ids"]]
            return web.json_response(said)

        self.engine = connect(start_server(reply))

    def _say(self, prompt: list[int], tokenizer: Any, answers: Callable[[str], str]) -> dict[str, Any]:
        self.prompts.append(tokenizer.decode(prompt))
        tokens = tokenizer.encode(answers(self.prompts[-1]), add_special_tokens=False)
        number = len(self.exchanges)
        logprobs = [-number - at / 64 for at in range(len(tokens))]
        said = answer(tokens, str(number % 3), "stop")
        said["meta_info"]["output_token_logprobs"] = [[p, i, None] for p, i in zip(logprobs, tokens, strict=True)]
        self.exchanges.append(Exchange(prompt, tokens, logprobs, [number % 3] * len(tokens)))
        return said


def in_turn(*answers: str) -> Callable[[str], str]:
    left = iter(answers)
    return lambda prompt: next(left)


FIRST = "<think>\nSeven.\n</think>\n\n3<|im_end|>"
TRIES = [  # template, answers to a question and to "again", prompts, sequences
    ("qwen3", (FIRST, "<think>\nOh.\n</think>\n\n4<|im_end|>", "7<|im_end|>"), 3),
    ("qwen3", ("3<|im_end|>", "4<|im_end|>", "7<|im_end|>"), 1),
    ("qwen3", ("3<|im_end|>", "<think>\nOh.\n</think>\n\n4<|im_end|>", "7<|im_end|>"), 2),
    ("glm_4_5", ("\n<think>Seven.</think>\n3<|user|>", "\n<think>Oh.</think>\n4<|user|>", "7<|user|>"), 3),
    ("glm_4_5", ("\n<think></think>\n3<|user|>", "\n<think></think>\n4<|user|>", "7<|user|>"), 1),
    ("glm_4_5", ("\n<think></think>\n3 \n<|user|>", "\n<think></think>\n4<|user|>", "7<|user|>"), 2),
    ("deepseek_r1_distill", tuple(f"Oh.\n</think>\n\n{n}<｜end▁of▁sentence｜>" for n in (3, 4, 7)), 3),
]


@pytest.mark.parametrize(("template", "answers", "sequences"), TRIES)
def test_each_answer_is_trained_once_in_the_context_that_the_template_gave_it(
    start_server: Any, connect: Any, template: str, answers: tuple[str, ...], sequences: int
) -> None:
    tokenizer = tokenizer_of(template)
    talk = Talk(start_server, connect, tokenizer, in_turn(*answers))
    workflow = MultiTurnWorkflow(last_line, GCONFIG, tokenizer, MultiTurnConfig(turn_discount=0.5, feedback="again"))
    with stats_tracker.scope("here"):
        batch = talk.engine.rollout_batch([DATA], workflow)
    assert_trained_once(batch, talk.exchanges)
    assert batch.num_seqs == sequences
    assert (batch.num_samples, batch["rewards"].tolist()) == (1, [0.25] * sequences)
    assert stats_tracker.export()["here/rollout/segments_per_episode"] == sequences
    messages: list[Any] = list(DATA["messages"])
    for prompt, text in zip(talk.prompts, answers, strict=True):
        assert prompt == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        said = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:-1])
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]


def last_line(prompt: str, completions: str, *_: Any, **data: Any) -> float:
    return reward_of_seven(prompt, completions.splitlines()[-1], [], [], **data)


TOOLS = [  # template, answers, sequences
    ("qwen3", (f"<think>\nI ask.\n</think>\n\n{CALL}<|im_end|>", "7<|im_end|>"), 1),  # kept in a loop of tools
    ("qwen3", (f"<think>I ask.</think>{CALL}<|im_end|>", "7<|im_end|>"), 2),  # written in another way than Qwen3's
    ("glm_4_5", (f"\n<think>I ask.</think>\n{CALL}<|observation|>", "7<|user|>"), 1),
    ("glm_4_5", (f"\n<think> I ask. </think>\n{CALL}<|observation|>", "7<|user|>"), 2),
]


@pytest.mark.parametrize(("template", "answers", "sequences"), TOOLS)
def test_results_of_tools_are_read_as_the_template_writes_them(
    start_server: Any, connect: Any, template: str, answers: tuple[str, ...], sequences: int
) -> None:
    tokenizer = tokenizer_of(template)
    talk = Talk(start_server, connect, tokenizer, in_turn(*answers))
    workflow = ToolWorkflow(reward_of_seven, GCONFIG, tokenizer)
    assert workflow.role == "tool"
    batch = talk.engine.rollout_batch([DATA], workflow)
    assert_trained_once(batch, talk.exchanges)
    assert batch["rewards"].tolist() == [1.0] * sequences
    assert "<tool_response>\n7\n</tool_response>" in talk.prompts[1]


def test_the_calls_of_an_agent_are_one_sample_and_what_two_continue_is_trained_once(
    start_server: Any, connect: Any
) -> None:
    tokenizer = tokenizer_of("qwen3")
    thought = "<think>\nHm.\n</think>\n\n3<|im_end|>"

    def agent(base_url: str, api_key: str, data: dict[str, Any]) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)

        def ask(messages: list[Any], text: str) -> list[Any]:
            asked = [*messages, {"role": "user", "content": text}]
            reply = client.chat.completions.create(model="policy", messages=asked)
            return [*asked, {"role": "assistant", "content": reply.choices[0].message.content}]

        plain = ask([], "plain")  # continued twice, and kept by the template
        ask(plain, "left")
        ask(ask(plain, "thought"), "right")  # the second continuation reads the first answer, then forks
        again = ask([], "plain")  # the same words once more: another conversation
        ask(again, "left")
        return 1.0

    def says(prompt: str) -> str:
        return thought if prompt.endswith("thought<|im_end|>\n<|im_start|>assistant\n") else "plainly<|im_end|>"

    talk = Talk(start_server, connect, tokenizer, says)
    batch = talk.engine.rollout_batch([DATA], AgentWorkflow(agent, GCONFIG.new(n_samples=2), tokenizer))
    assert len(talk.exchanges) == 2 * 6
    assert_trained_once(batch, talk.exchanges)
    assert batch.num_samples == 2
    assert batch.samples.tolist() == sorted(batch.samples.tolist())
    assert [episode.group.num_samples for episode in talk.engine.episodes] == [2]


def test_a_template_that_often_rewrites_is_warned_about_once_with_what_it_changed(caplog: Any) -> None:
    template = ChatTemplate(tokenizer_of("qwen3"))
    with caplog.at_level(logging.WARNING):
        for _ in range(MANY_REWRITES):
            assert not caplog.records
            converse(template, [FIRST, FIRST])
        for _ in range(MANY_REWRITES):
            converse(template, [FIRST, FIRST])
    (record,) = caplog.records
    assert f"rewrites earlier turns in {MANY_REWRITES} of {MANY_REWRITES} prompts: '<think>" in record.message
    assert "became '3<|im_end|>" in record.message


def converse(template: ChatTemplate, answers: list[str]) -> Conversation:
    conversation = Conversation(template)
    for text in answers:
        request = conversation.ask([{"role": "user", "content": "?"}], GCONFIG, None)
        assert request is not None
        tokens = template.tokenizer.encode(text, add_special_tokens=False)
        conversation.sample(ModelResponse(request.input_ids, tokens, [-1.0] * len(tokens), [0] * len(tokens)))
    return conversation


def test_a_copy_goes_on_without_the_one_it_was_made_of() -> None:
    conversation = converse(ChatTemplate(tokenizer_of("qwen3")), [FIRST])
    tokens = list(conversation.tokens)
    copied = conversation.copy()
    copied.segments[-1].give([7])
    assert conversation.tokens == tokens
    assert copied.tokens == [*tokens, 7]


def test_a_prompt_without_room_changes_nothing(caplog: Any) -> None:
    conversation = converse(ChatTemplate(tokenizer_of("qwen3")), [FIRST])
    for _ in range(2):
        assert conversation.ask([{"role": "user", "content": "?" * 99}], GCONFIG, 90) is None
        assert len(conversation.segments) == 1
        assert conversation.messages[-1] == {"role": "assistant", "content": FIRST.removesuffix("<|im_end|>")}
    assert conversation.ask([{"role": "user", "content": "?"}], GCONFIG, 90) is not None


def test_a_stop_string_that_is_a_special_token_is_part_of_the_answer() -> None:
    tokenizer = tokenizer_of("qwen3")
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL["qwen3"], "</tool_call>"]})
    conversation = Conversation(ChatTemplate(tokenizer))
    request = conversation.begin(DATA["messages"], GCONFIG.new(stop=["</tool_call>"]), None)  # type: ignore[arg-type]
    tokens = tokenizer.encode("<tool_call>x</tool_call>")
    conversation.sample(ModelResponse(request.input_ids, tokens, [-1.0] * len(tokens), [0] * len(tokens)))
    request = conversation.ask([{"role": "user", "content": "?"}], GCONFIG, None)  # type: ignore[assignment]
    assert len(conversation.segments) == 1
    assert "x</tool_call><|im_end|>\n<|im_start|>user" in tokenizer.decode(request.input_ids)


def test_a_base_model_without_a_template_has_one_sequence() -> None:
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = None
    conversation = converse(ChatTemplate(tokenizer), ["a" + tokenizer.eos_token, "b"])
    (segment,) = conversation.segments
    assert tokenizer.decode(segment.tokens) == f"?a{tokenizer.eos_token}?b"


# Each way of showing one earlier message: kept, without its thoughts, trimmed, shouted, numbered from the end, dropped.
SHOWN = [
    "m.content",
    "m.content.split('</think>')[-1]",
    "m.content | trim",
    "m.content | upper",
    "(messages | length - loop.index0) ~ m.content",
    "(m.content if loop.last or loop.index0 % 2 else '')",
]
PLAIN = SHOWN[0]


def random_template(earlier: str, latest: str, since: int) -> str:
    """Shows messages before the last `since` ones as `earlier`, later answers as `latest`."""
    shown = f"({earlier}) if loop.index0 + {since} < messages | length else ({latest})"
    answer = f"{{{{ '<|assistant|>' ~ ({shown}) ~ eos_token }}}}"
    other = "{{ '<|user|>' ~ m.content }}"
    body = f"{{% if m.role == 'assistant' %}}{answer}{{% else %}}{other}{{% endif %}}"
    return f"{{% for m in messages %}}{body}{{% endfor %}}<|assistant|>"


@st.composite
def answers(draw: st.DrawFn, vocab: int, eos: int) -> list[int]:
    """Any tokens: broken UTF-8, special ones in the middle, nothing at all; ended or cut off."""
    tokens = draw(st.lists(st.integers(0, vocab - 1), max_size=6))
    return tokens + [eos] * draw(st.booleans())


@fuzzed(bounded=80, long=20_000)
def test_under_any_template_every_sampled_token_is_trained_once_where_it_was_sampled(effort: Any) -> None:
    tokenizer = copy.deepcopy(small_tokenizer())
    eos, vocab = tokenizer.eos_token_id, len(tokenizer)

    @effort
    @given(st.sampled_from(SHOWN), st.sampled_from(SHOWN), st.integers(0, 4), st.data())
    def holds(earlier: str, latest: str, since: int, data: st.DataObject) -> None:
        tokenizer.chat_template = random_template(earlier, latest, since)
        template, numbers = ChatTemplate(tokenizer), itertools.count()
        samples, exchanges = [], []
        for _ in range(data.draw(st.integers(1, 2))):
            conversation = Conversation(template)
            for _ in range(data.draw(st.integers(1, 5))):
                turn = {"role": "user", "content": data.draw(st.sampled_from(["go on", "</think>", " é "]))}
                before = list(conversation.messages)
                request = conversation.ask([turn], GCONFIG, None)
                assert request is not None
                if all(m["content"].isascii() and "\ufffd" not in m["content"] for m in before):
                    assert tokenizer.decode(request.input_ids) == template.text([*before, turn])
                tokens, number = data.draw(answers(vocab, eos)), next(numbers)
                logprobs = [-number - at / 8 for at in range(len(tokens))]
                reason: Any = "stop" if tokens[-1:] == [eos] else "length"
                response = ModelResponse(request.input_ids, tokens, logprobs, [number] * len(tokens), reason)
                conversation.sample(response)
                exchanges.append(Exchange(request.input_ids, tokens, logprobs, response.output_versions))
            if earlier == latest == PLAIN:
                assert len(conversation.segments) == 1
            samples.append(conversation.segments)
        batch = pack(pad_samples(samples, [float(i) for i in range(len(samples))]), "test")
        assert_trained_once(batch, [exchange for exchange in exchanges if exchange.tokens])
        assert batch.of_samples("rewards").tolist() == [float(i) for i in range(len(samples))]

    holds()


def test_padded_samples_keep_the_order_of_their_segments_and_drop_those_never_sampled() -> None:
    first = converse(ChatTemplate(tokenizer_of("qwen3")), [FIRST, "", FIRST]).segments
    assert len(first) == 2  # an answer of no token is continued
    second = converse(ChatTemplate(tokenizer_of("qwen3")), [""]).segments
    padded = pad_samples([first, second], [1.0, 0.0])
    assert padded["sample_ids"].tolist() == [0, 0, 1]
    assert padded["rewards"].tolist() == [1.0, 1.0, 0.0]
    assert pad_samples([[*second, *first]], [1.0])["sample_ids"].tolist() == [0, 0]
    with pytest.raises(ValueError, match="2 samples need as many rewards, got 1"):
        pad_samples([first, second], [1.0])
    assert json.dumps(padded["loss_mask"].any(1).tolist()) == "[true, true, false]"
    assert torch.equal(padded["versions"] >= 0, padded["loss_mask"])
