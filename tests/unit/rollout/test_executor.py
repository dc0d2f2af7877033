import asyncio
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from megarl.knobs import UserError
from megarl.observe.metrics import stats_tracker
from megarl.rollout.api import RolloutWorkflow
from megarl.rollout.executor import LoopThread, WorkflowError, run_episode


def group(value: int, n: int = 2, **changes: Any) -> dict[str, Any]:
    """A group of `n` completions of 2 tokens each, all of them `value`, after a prompt of one."""
    tensors = {
        "input_ids": torch.full((n, 3), value),
        "attention_mask": torch.ones(n, 3),
        "loss_mask": torch.tensor([[0, 1, 1]] * n),
        "rollout_logprobs": torch.zeros(n, 3),
        "versions": torch.tensor([[-1, 0, 0]] * n),
        "rewards": torch.full((n,), float(value)),
    } | changes
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


class Returns(RolloutWorkflow):
    """Returns what `make(data)` gives."""

    def __init__(self, make):
        self.make = make

    async def arun_episode(self, engine, data):
        return self.make(data)


@pytest.fixture
def engine(start_server, connect):
    stats_tracker.export()
    return connect(start_server())


def prompts(n: int) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"question {i}"}], "i": i} for i in range(n)]


def test_groups_come_in_the_order_of_the_prompts_whatever_ends_first(engine):
    ended = []
    turns = [asyncio.Event() for _ in range(6)]
    turns[5].set()

    class Backwards(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            await turns[data["i"] + 1].wait()
            ended.append(data["i"])
            turns[data["i"]].set()
            return group(data["i"], n=1 + data["i"] % 2)

    batch = engine.rollout_batch(prompts(5), workflow=Backwards())
    assert ended == [4, 3, 2, 1, 0]
    assert batch["group_ids"].tolist() == [0, 1, 1, 2, 3, 3, 4]
    assert batch["rewards"].tolist() == [0, 1, 1, 2, 3, 3, 4]
    assert batch["input_ids"].tolist() == [i for i in batch["group_ids"].tolist() for _ in range(3)]


def test_the_batch_has_the_fixed_dtypes_whatever_the_workflow_returned(engine):
    batch = engine.rollout_batch(prompts(1), Returns(lambda d: group(1, rewards=torch.tensor([1, 0]))))
    kinds = {key: batch[key].dtype for key in (*batch.tokens, *batch.sequences)}
    assert kinds == {
        "input_ids": torch.int64,
        "loss_mask": torch.bool,
        "rollout_logprobs": torch.float32,
        "versions": torch.int32,
        "rewards": torch.float32,
        "group_ids": torch.int64,
    }


def test_a_tensordict_is_accepted_and_a_reward_per_token_stays_one(engine):
    def make(data):
        return TensorDict(group(7, n=1, rewards=torch.full((3,), 0.5).unsqueeze(0)), batch_size=[1])

    batch = engine.rollout_batch(prompts(2), Returns(make))
    assert batch.num_seqs == 2
    assert batch.tokens["rewards"].tolist() == [0.5] * 6


def test_rejected_prompts_are_left_out_and_accounted(engine):
    batch = engine.rollout_batch(prompts(3), Returns(lambda d: None if d["i"] == 1 else group(d["i"])))
    assert batch["group_ids"].tolist() == [0, 0, 2, 2]
    assert [(e.prompt_id, e.group is None, e.reason) for e in engine.episodes] == [
        ("0", False, ""),
        ("1", True, "rejected by Returns"),
        ("2", False, ""),
    ]
    assert stats_tracker.export()["rollout/rejected"] == 1


def test_a_batch_of_rejected_prompts_is_an_error(engine):
    with pytest.raises(WorkflowError, match=r"all 2 episodes were rejected.*rejected by Returns"):
        engine.rollout_batch(prompts(2), Returns(lambda d: None))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (group(1, rewards=None), r"without \['rewards'\]"),
        (group(1, attention_mask=None), r"without \['attention_mask'\]"),
        (group(1, loss_mask=torch.zeros(2, 4)), r"loss_mask of shape \(2, 4\); it must be that of input_ids, \(2, 3\)"),
        (group(1, rewards=torch.zeros(3)), r"rewards has shape \(3,\)"),
        (group(1) | {"answer": "8"}, "answer as a str; every value must be a tensor"),
        ({key: value[:0] for key, value in group(1).items()}, "a group without a sample"),
        ([1, 2], "returned a list; return a dict of tensors, or None"),
    ],
)
def test_what_a_workflow_returns_wrong_is_named_with_workflow_key_and_prompt(engine, returned, message):
    with pytest.raises(UserError, match=message) as caught:
        engine.rollout_batch(prompts(1), Returns(lambda d: returned))
    assert "Returns failed on prompt 0 'question 0'" in str(caught.value)
    assert "\n" not in str(caught.value)


POISONS = {
    "rollout_logprobs not finite": group(1, rollout_logprobs=torch.tensor([[0, -1.0, -1.0], [0, float("nan"), -1.0]])),
    "rewards not finite": group(1, rewards=torch.tensor([0.5, float("inf")])),
    "token outside the vocabulary": group(1, input_ids=torch.tensor([[1, 2, 3], [1, 2, 10]])),
    "no token to train on": group(1, loss_mask=torch.tensor([[0, 1, 1], [0, 0, 0]])),
    "reward failed": group(1) | {"reward_failed": torch.tensor([False, True])},
}


@pytest.mark.parametrize("reason", POISONS)
def test_a_poisoned_sample_is_left_out_and_counted(engine, reason):
    engine.vocab_size = 10
    batch = engine.rollout_batch(prompts(2), Returns(lambda d: POISONS[reason]))
    assert batch.num_seqs == 2
    assert batch["group_ids"].tolist() == [0, 1]
    assert [episode.dropped for episode in engine.episodes] == [{reason: 1}] * 2
    assert stats_tracker.export()["rollout/dropped_samples"] == 2


def segments(value: int, **changes: Any) -> dict[str, Any]:
    """A group of two samples, the first in two segments."""
    return group(value, 3, sample_ids=torch.tensor([0, 0, 1]), **changes)


SEGMENT_POISONS = {
    "rollout_logprobs not finite": segments(
        1, rollout_logprobs=torch.tensor([[0, 0, 0], [0, 0, float("nan")], [0] * 3])
    ),
    "rewards not finite": segments(1, rewards=torch.tensor([1.0, float("inf"), 1.0])),
    "token outside the vocabulary": segments(1, input_ids=torch.tensor([[1, 2, 10], [1, 2, 3], [1, 2, 3]])),
    "reward failed": segments(1, reward_failed=torch.tensor([True, True, False])),
}


@pytest.mark.parametrize("reason", SEGMENT_POISONS)
def test_a_sample_is_left_out_with_all_its_segments_and_counted_once(engine, reason):
    engine.vocab_size = 10
    batch = engine.rollout_batch(prompts(2), Returns(lambda d: SEGMENT_POISONS[reason]))
    assert batch["sample_ids"].tolist() == [1, 1]
    assert [episode.dropped for episode in engine.episodes] == [{reason: 1}] * 2
    assert stats_tracker.export()["rollout/dropped_samples"] == 2


def test_a_segment_without_a_trained_token_stays_with_its_sample(engine):
    masks = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 0]])
    batch = engine.rollout_batch(prompts(1), Returns(lambda d: segments(1, loss_mask=masks)))
    assert batch["sample_ids"].tolist() == [0, 0]
    assert engine.episodes[0].dropped == {"no token to train on": 1}


def test_the_numbers_of_a_batch_are_of_samples_not_of_segments(engine):
    rewards = torch.tensor([1.0, 1.0, 0.0])
    engine.rollout_batch(prompts(2), Returns(lambda d: segments(1, rewards=rewards)))
    stats = stats_tracker.export()
    assert stats["rollout/reward"] == 0.5
    assert (stats["rollout/completion_len"], stats["rollout/completion_len_max"]) == (3, 4)
    assert stats["rollout/segments_per_episode"] == 1.5


def test_several_runs_of_a_prompt_have_samples_of_their_own(engine):
    returns = Returns(lambda d: segments(1))
    episode = asyncio.run(run_episode(engine, 7, {}, returns, group_size=2))
    assert episode.group.num_samples == 4
    assert episode.group.samples.tolist() == [0, 0, 1, 2, 2, 3]


def test_an_empty_completion_is_left_out(engine):
    with_an_empty_one = group(
        1, attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]), loss_mask=torch.tensor([[0, 1, 1], [0, 0, 0]])
    )
    batch = engine.rollout_batch(prompts(1), Returns(lambda d: with_an_empty_one))
    assert batch.lengths.tolist() == [3]


def test_a_group_of_poisoned_samples_is_rejected_with_the_reason(engine):
    poisoned = group(1, rewards=torch.full((2,), float("nan")))
    batch = engine.rollout_batch(prompts(2), Returns(lambda d: poisoned if d["i"] else group(1)))
    assert batch["group_ids"].tolist() == [0, 0]
    assert engine.episodes[1].reason == "no sample can be trained on: rewards not finite (2)"


def test_workflows_must_return_the_same_keys_for_every_prompt(engine):
    with pytest.raises(ValueError, match="a workflow must return the same keys"):
        engine.rollout_batch(prompts(2), Returns(lambda d: group(1) if d["i"] else group(1, versions=None)))


def test_a_failing_episode_names_its_prompt_and_the_others_are_cancelled_first(engine):
    cancelled = []

    class Fails(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            if data["i"] == 1:
                await asyncio.sleep(0.05)
                raise ZeroDivisionError("no tokens")
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.05)
                cancelled.append(data["i"])

    start = time.monotonic()
    with pytest.raises(WorkflowError) as caught:
        engine.rollout_batch(prompts(4), Fails())
    assert str(caught.value) == "Fails failed on prompt 1 'question 1': ZeroDivisionError: no tokens"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert sorted(cancelled) == [0, 2, 3]
    assert time.monotonic() - start < 300


def test_a_users_mistake_in_an_episode_stays_one(engine):
    def mistake(data):
        raise UserError("the reference has no answer")

    with pytest.raises(UserError, match="Returns failed on prompt 0 'question 0': the reference has no answer"):
        engine.rollout_batch(prompts(2), Returns(mistake))


def test_a_prompts_own_id_is_used(engine):
    engine.rollout_batch([{"prompt_id": "train-17"}], Returns(lambda d: group(1)))
    assert engine.episodes[0].prompt_id == "train-17"


def test_an_episode_that_never_ends_meets_the_batch_deadline(start_server, connect):
    class Hangs(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            await asyncio.sleep(3600)

    engine = connect(start_server(), batch_timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"Hangs on 2 prompts did not end within 0\.2 s"):
        engine.rollout_batch(prompts(2), Hangs())


def test_a_workflow_that_blocks_the_loop_meets_the_batch_deadline_too(start_server, connect):
    released = threading.Event()

    class Blocks(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            released.wait(300)

    engine = connect(start_server(), batch_timeout_s=0.2)
    with pytest.raises(TimeoutError, match="Blocks on 1 prompts"):
        engine.rollout_batch(prompts(1), Blocks())
    released.set()


def test_ctrl_c_gets_through_at_once_and_cancels_the_episodes(engine):
    cancelled, over = threading.Event(), threading.Event()

    def waits():
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None and frame.f_code is not Future.result.__code__:
            frame = frame.f_back
        return frame is not None

    def interrupt():
        while not waits() and not over.is_set():  # the main thread waits for the batch: earlier is nothing to cancel
            time.sleep(0.01)
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    class Hangs(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            threading.Thread(target=interrupt, daemon=True).start()
            try:
                await asyncio.sleep(3600)
            finally:
                cancelled.set()

    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.rollout_batch(prompts(1), Hangs())
    finally:
        over.set()
    assert time.monotonic() - start < 300
    assert cancelled.wait(300)
    assert engine.rollout_batch(prompts(1), Returns(lambda d: group(1))).num_seqs == 2


def test_a_batch_without_prompts_is_refused(engine):
    with pytest.raises(UserError, match="got no prompts"):
        engine.rollout_batch([], Returns(lambda d: group(1)))


def test_the_numbers_of_a_batch_are_recorded_in_the_callers_scope(engine):
    engine.set_version(5)
    versions = torch.tensor([[-1, 3, 5], [-1, 5, 5]])
    with stats_tracker.scope("eval"):
        engine.rollout_batch(
            prompts(1), Returns(lambda d: group(1, rewards=torch.tensor([1.0, 0.0]), versions=versions))
        )
    stats = stats_tracker.export()
    assert stats["eval/rollout/reward"] == 0.5
    assert stats["eval/rollout/staleness"] == 0.5
    assert stats["eval/rollout/staleness_max"] == 2
    assert stats["eval/rollout/completion_len"] == 2
    assert stats["eval/rollout/tokens_per_s"] > 0


def test_a_thread_that_stops_cancels_what_runs_and_waits_for_it():
    ended = []

    async def runs():
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    thread, begun = LoopThread("test-stop"), threading.Event()
    thread.submit(runs())
    assert begun.wait(300)
    thread.stop()
    assert ended == [True]
