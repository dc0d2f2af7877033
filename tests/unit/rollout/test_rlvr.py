import asyncio
import functools
import itertools
import threading

import pytest
from aiohttp import web
from fault_server import answer

from megarl.data.tokenizer import train_tokenizer
from megarl.rewards.pool import RewardConfig, RewardPool
from megarl.rollout import reward_call
from megarl.rollout.executor import NoSamplesError
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.types import GenerationHyperparameters
from tests.unit.rewards.functions import double

GCONFIG = GenerationHyperparameters(n_samples=3, max_new_tokens=4)
DATA = {"messages": [{"role": "user", "content": "Leo has 7 pens."}], "answer": "#### 7"}


@pytest.fixture
def engine(start_server, connect, tokenizer):
    """Each completion says its number in the group, then ends with eos."""

    async def reply(body, request):
        texts = [str(i) for i in range(len(body["input_ids"]))]
        return web.json_response(
            [answer([*tokenizer.encode(text), tokenizer.eos_token_id], reason="stop") for text in texts]
        )

    return connect(start_server(reply))


def test_a_reward_function_gets_texts_ids_and_the_datas_columns(engine, tokenizer):
    calls = []

    def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
        calls.append((prompt, completions, prompt_ids, completion_ids, data))
        return int(completions)

    batch = engine.rollout_batch([DATA], RLVRWorkflow(reward_fn, GCONFIG, tokenizer))
    prompt_ids = tokenizer.apply_chat_template(DATA["messages"], add_generation_prompt=True, return_dict=False)
    assert [call[0] for call in calls] == ["<|user|>Leo has 7 pens.<|assistant|>"] * 3
    assert [call[1] for call in calls] == ["0", "1", "2"]
    assert [call[2] for call in calls] == [prompt_ids] * 3
    assert [call[3] for call in calls] == [[tokenizer.encode(str(i))[0], tokenizer.eos_token_id] for i in range(3)]
    assert all(call[4] == DATA for call in calls)
    assert batch["rewards"].tolist() == [0, 1, 2]
    assert batch["group_ids"].tolist() == [0, 0, 0]


def test_the_eos_token_is_trained_on(engine, tokenizer):
    batch = engine.rollout_batch([DATA], RLVRWorkflow(lambda *a, **k: 0.0, GCONFIG, tokenizer))
    last = batch["cu_seqlens"][1:].long() - 1
    assert batch["input_ids"][last].tolist() == [tokenizer.eos_token_id] * 3
    assert batch["loss_mask"][last].all()


def test_a_reward_function_may_be_async_and_partial(engine, tokenizer):
    async def reward_fn(prompt, completions, prompt_ids, completion_ids, scale, **data):
        await asyncio.sleep(0)
        return scale * int(completions)

    workflow = RLVRWorkflow(functools.partial(reward_fn, scale=0.5), GCONFIG, tokenizer)
    assert engine.rollout_batch([DATA], workflow)["rewards"].tolist() == [0, 0.5, 1]


def test_a_slow_reward_function_does_not_hold_up_other_episodes(engine, tokenizer):
    beside = threading.Barrier(2, timeout=300)

    def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
        beside.wait()  # until another episode's reward is computed at the same time
        return 0.0

    batch = engine.rollout_batch([DATA] * 4, RLVRWorkflow(reward_fn, GCONFIG.new(n_samples=1), tokenizer))
    assert batch["rewards"].tolist() == [0.0] * 4


def test_a_sample_whose_reward_fails_is_left_out_and_counted(engine, tokenizer, caplog):
    def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
        if completions == "1":
            raise KeyError("solution")
        return 0.5

    batch = engine.rollout_batch([DATA], RLVRWorkflow(reward_fn, GCONFIG, tokenizer))
    assert batch["rewards"].tolist() == [0.5, 0.5]
    assert engine.episodes[0].dropped == {"reward failed": 1}
    assert "reward_fn failed, KeyError: 'solution'" in caplog.text


@pytest.mark.parametrize("in_pool", [False, True])
def test_a_completion_in_a_failures_cause_does_not_steer_the_terminal(engine, tokenizer, caplog, in_pool):
    def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
        raise ValueError(f"no answer in \x1b[2J\u202e{completions}\nend")

    with RewardPool([reward_fn], RewardConfig(time_limit_s=300.0)) as pool:
        workflow = RLVRWorkflow(pool if in_pool else reward_fn, GCONFIG, tokenizer)
        with pytest.raises(NoSamplesError, match="no answer in") as stopped:
            engine.rollout_batch([DATA] * 4, workflow)
    for text in (str(stopped.value), caplog.text):
        assert not set(text) & set("\x1b\u202e")
        assert r"no answer in \x1b[2J\u202e" in text


def test_an_async_reward_that_fails_is_left_out_and_counted(engine, tokenizer, caplog):
    async def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
        await asyncio.sleep(0)
        return {"0": 0.5, "1": float("nan"), "2": "1.0"}[completions]

    batch = engine.rollout_batch([DATA], RLVRWorkflow(reward_fn, GCONFIG, tokenizer))
    assert batch["rewards"].tolist() == [0.5]
    assert engine.episodes[0].dropped == {"reward failed": 2}
    assert "the reward is nan, which is no finite number" in caplog.text
    assert "it returned the text '1.0'; return a number, such as float() of it" in caplog.text


@pytest.mark.parametrize(("what", "cause"), [("hang", "time"), ("exit", "died"), ("raise", "raised")])
def test_a_sample_that_the_pool_cannot_score_is_left_out_and_counted(engine, tokenizer, what, cause):
    """The pool is how runs score: an async reward whose process hangs, dies or raises for the second sample."""
    numbers = itertools.count()

    async def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
        i = int(completions)
        next(numbers)
        return await pool(prompt, completions, prompt_ids, completion_ids, i=i, what=what if i == 1 else "")

    with RewardPool([double], RewardConfig(time_limit_s=5.0 if what == "hang" else 300.0)) as pool:
        batch = engine.rollout_batch([DATA], RLVRWorkflow(reward_fn, GCONFIG, tokenizer))
        assert dict(pool.failures) == {cause: 1}
    assert next(numbers) == 3
    assert batch["rewards"].tolist() == [0.0, 4.0]
    assert engine.episodes[0].dropped == {"reward failed": 1}


def test_a_reward_function_that_always_fails_stops_the_run(engine, tokenizer, caplog):
    def reward_fn(prompt, completions, prompt_ids, completion_ids, solution, **data):
        return 0.0

    cause = "reward_fn failed, TypeError: .*missing 1 required positional argument: 'solution'"
    with pytest.raises(NoSamplesError, match=rf"no sample can be trained on: reward failed \(3\): {cause}"):
        engine.rollout_batch([DATA] * 2, RLVRWorkflow(reward_fn, GCONFIG, tokenizer))
    assert len([r for r in caplog.records if "'solution'" in r.getMessage()]) == 1  # six samples of one cause


def test_a_tokenizer_without_a_chat_template_encodes_the_text(engine):
    tokenizer = train_tokenizer()
    tokenizer.chat_template = None
    seen = []

    def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
        seen.append((prompt, prompt_ids))
        return 0.0

    engine.rollout_batch([DATA], RLVRWorkflow(reward_fn, GCONFIG, tokenizer))
    assert seen[0] == ("Leo has 7 pens.", tokenizer.encode("Leo has 7 pens."))


def test_two_threads_warn_of_one_cause_once(monkeypatch):
    both, warnings = threading.Event(), []

    def fail():
        reward_call.failure_of("f", ValueError("of two threads"))

    def warning(*arguments):
        warnings.append(arguments)
        if len(warnings) == 1:
            other.start()
            both.wait(1.0)
        else:
            both.set()

    other = threading.Thread(target=fail)
    monkeypatch.setattr(reward_call.logger, "warning", warning)
    fail()
    other.join(300)
    assert len(warnings) == 1
