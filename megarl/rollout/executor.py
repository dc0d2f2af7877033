"""Runs one episode per prompt at once and packs what they return, in the order of the prompts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from megarl.knobs import UserError, visible
from megarl.observe.metrics import stats_tracker
from megarl.rollout import reward_call, sampling_seeds
from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.together import together
from megarl.types import ORIGIN, TEACHER_SAMPLED, Episode, PackedBatch, trained_tokens_of_samples

T = TypeVar("T")
Attend = Callable[[Coroutine[Any, Any, T]], Coroutine[Any, Any, T]]  # supervises a wait

REQUIRED_KEYS = ("input_ids", "attention_mask", "loss_mask", "rewards")
TOKEN_KEYS = ("input_ids", "attention_mask", "loss_mask", "versions", "rollout_logprobs")
DTYPES = {
    "input_ids": torch.int64,
    "loss_mask": torch.bool,
    "versions": torch.int32,
    "rollout_logprobs": torch.float32,
    "rewards": torch.float32,
}
STOP_GRACE_S = 60.0  # for a workflow that blocks the loop: a busy machine gives its thread no time for seconds


class WorkflowError(RuntimeError):
    """An episode failed. Names the workflow, the prompt and the cause."""


class NoSamplesError(WorkflowError):
    """No sample of a step can be trained on. Names the first cause. The last finished step is saved before the end."""


class LoopThread:
    """An asyncio loop in a daemon thread: the trainer's main thread stays synchronous and receives Ctrl-C."""

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts `coroutine` on the loop, in a copy of the caller's context with its `stats_tracker` scopes."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """The result of `coroutine`. Cancels it and raises TimeoutError after `timeout_s`, or on Ctrl-C at once."""
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():  # raised by the coroutine itself
                raise
            raise TimeoutError(f"{what} did not end within {timeout_s:g} s") from error
        finally:
            future.cancel()

    def cancel_all(self) -> None:
        """Cancels everything that runs on the loop and waits for its end, at most STOP_GRACE_S."""

        async def cancel() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.run(cancel(), STOP_GRACE_S, "cancelling the rollouts")

    def stop(self) -> None:
        """Cancels everything that runs, waits for it and ends the thread."""
        try:
            self.cancel_all()
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(STOP_GRACE_S)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the thread {self._thread.name} did not end within {STOP_GRACE_S:g} s: a workflow blocks it"
            )
        self.loop.close()


async def run_episodes(
    engine: InferenceEngine, data: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow
) -> list[Episode]:
    """Runs one episode per item of `data`, all at once; returns them in the order of `data`.

    The first failure is raised, a `UserError` unchanged and everything else as `WorkflowError`. The other episodes are
    then cancelled and awaited.
    """
    sampling_seeds.stream.set(sampling_seeds.SeedStream(sampling_seeds.BATCH))
    return await together(run_episode(engine, i, item, workflow) for i, item in enumerate(data))


async def run_episode(
    engine: InferenceEngine, index: int, item: Mapping[str, Any], workflow: RolloutWorkflow, group_size: int = 1
) -> Episode:
    """Runs one prompt through the workflow `group_size` times and joins the results into one episode.

    Its `group_ids` are all `index`. The prompt's id is its `prompt_id` field, else the index. Samples that cannot be
    trained on are left out and counted.
    """
    prompt_id = str(item.get("prompt_id", index))
    name = type(workflow).__name__
    data = dict(item)
    origin = data.pop(ORIGIN, {})
    failures: list[str] = []
    reward_call.causes.set(failures)
    try:
        version = engine.get_version()
        runs = (_run(workflow, engine, dict(data), version, index, run) for run in range(group_size))
        results = [result for result in await together(runs) if result is not None]
        if not results:
            return Episode(prompt_id, None, f"rejected by {name}", origin=origin)
        joined = _join([pack(result, name) for result in results])
        group, dropped = quarantine(joined, engine.vocab_size, engine.max_sequence_tokens)
    except Exception as error:
        kind = UserError if isinstance(error, UserError) else WorkflowError
        cause = str(error) if isinstance(error, UserError) else visible(f"{type(error).__name__}: {error}")
        raise kind(f"{name} failed on prompt {prompt_id} {_excerpt(item)}: {cause}") from error
    if group is None:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in dropped.items())
        cause = f": {failures[0]}" if failures else ""
        return Episode(prompt_id, None, f"no sample can be trained on: {reasons}{cause}", dropped, origin)
    group.set_sequences("group_ids", torch.full((group.num_seqs,), index, dtype=torch.int64))
    return Episode(prompt_id, group, dropped=dropped, origin=origin)


async def _run(
    workflow: RolloutWorkflow, engine: InferenceEngine, data: dict[str, Any], version: int, index: int, run: int
) -> Any:
    """Runs the workflow on a prompt, with the seeds of run number `run` of that prompt."""
    sampling_seeds.stream.set(sampling_seeds.stream.get().child(version, index, run))
    return await workflow.arun_episode(engine, data)


def _join(groups: list[PackedBatch]) -> PackedBatch:
    """One group of several runs of a prompt. Equal `sample_ids` of two runs are different samples."""
    if len(groups) == 1:
        return groups[0]
    first = 0
    for group in groups:
        if "sample_ids" in group:
            samples = group.samples
            group.set_sequences("sample_ids", samples + first)
            first += int(samples.max()) + 1
    return PackedBatch.concat(groups)


def pack(result: Any, workflow: str) -> PackedBatch:
    """Checks and packs the dict or TensorDict of a workflow. Raises UserError naming workflow and key."""
    try:
        padded: dict[str, Tensor] = dict(result.items())
    except AttributeError:
        raise UserError(f"{workflow} returned a {type(result).__name__}; return a dict of tensors, or None") from None
    missing = [key for key in REQUIRED_KEYS if key not in padded]
    if missing:
        raise UserError(f"{workflow} returned {sorted(padded)} without {missing}; add them, each [n_samples, length]")
    for key, value in padded.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{workflow} returned {key} as a {type(value).__name__}; every value must be a tensor")
        if key in DTYPES:
            padded[key] = value.to(DTYPES[key])
        if key in TOKEN_KEYS and value.shape != padded["input_ids"].shape:
            shape, expected = tuple(value.shape), tuple(padded["input_ids"].shape)
            raise UserError(f"{workflow} returned {key} of shape {shape}; it must be that of input_ids, {expected}")
    try:
        batch = PackedBatch.from_padded(padded)
    except UserError as error:
        raise UserError(f"{workflow} returned a group that cannot be packed: {error}") from error
    if batch.num_seqs == 0:
        raise UserError(f"{workflow} returned a group without a sample; return None to reject the prompt")
    return batch


def quarantine(
    group: PackedBatch, vocab_size: int | None, max_sequence_tokens: int | None = None
) -> tuple[PackedBatch | None, dict[str, int]]:
    """Leaves out the samples of a group that cannot be trained on, with all their segments.

    Returns the others (None without any), and how many were left out, by reason.
    """
    samples = group.samples
    bad = torch.zeros(int(samples.max()) + 1, dtype=torch.bool)
    owner = torch.repeat_interleave(samples, group.lengths)  # sample of each token
    dropped: dict[str, int] = {}

    def leave_out(reason: str, affected: Tensor) -> None:
        nonlocal bad
        if not affected.any():
            return
        if count := int((affected & ~bad).sum()):
            dropped[reason] = count
        bad = bad | affected

    def any_token(flags: Tensor) -> Tensor:
        return torch.zeros_like(bad).index_fill_(0, owner[flags], True)

    def any_segment(flags: Tensor) -> Tensor:
        return torch.zeros_like(bad).index_fill_(0, samples[flags], True)

    if "reward_failed" in group:
        leave_out("reward failed", any_segment(group["reward_failed"].bool()))
    leave_out("no token to train on", ~any_token(group["loss_mask"].bool()))
    if max_sequence_tokens is not None:
        leave_out(f"more than {max_sequence_tokens} tokens", any_segment(group.lengths > max_sequence_tokens))
    for key, value in {**group.tokens, **group.sequences}.items():
        if value.is_floating_point() and not value.isfinite().all():
            # NaN in reward_columns: that reward does not apply.
            wrong = value.isinf() if key == "reward_columns" else ~value.isfinite()
            if key in group.tokens:
                leave_out(f"{key} not finite", any_token(wrong))
            else:
                leave_out(f"{key} not finite", any_segment(wrong.flatten(1).any(1) if value.ndim > 1 else wrong))
    ids = group["input_ids"]
    if vocab_size is not None and bool(((ids < 0) | (ids >= vocab_size)).any()):
        leave_out("token outside the vocabulary", any_token((ids < 0) | (ids >= vocab_size)))
    if not bad.any():
        return group, dropped
    good = (~bad)[samples].nonzero().squeeze(1).tolist()
    return (group.select(good) if good else None), dropped


def assemble(episodes: Sequence[Episode]) -> PackedBatch:
    """Joins the groups of the episodes in their order. `group_ids` are positions in the batch of prompts."""
    groups = [episode.group for episode in episodes if episode.group is not None]
    if not groups:
        raise NoSamplesError(f"all {len(episodes)} episodes were rejected, the first because: {episodes[0].reason}")
    return PackedBatch.concat(groups)


def record_stats(episodes: Sequence[Episode], batch: PackedBatch, version: int, sampled: tuple[float, float]) -> None:
    """Records a batch's numbers with `stats_tracker`.

    They are reward and lengths in tokens of the samples, staleness in versions, and `tokens_per_s`. `sampled` is the
    tokens and seconds of sampling; no rate is recorded with 0 seconds. Workflows that may cut a conversation into
    several sequences also have `segments_per_episode`, the mean number of them.
    """
    mask = batch["loss_mask"]
    completion_lens = trained_tokens_of_samples(batch)
    rewards = batch.of_samples("rewards") if "rewards" in batch.sequences else batch["rewards"]
    stats_tracker.scalar(
        reward=float(rewards.mean()),
        completion_len=float(completion_lens.mean()),
        completion_len_max=float(completion_lens.max()),
        rejected=sum(episode.group is None for episode in episodes),
        dropped_samples=sum(sum(episode.dropped.values()) for episode in episodes),
    )
    if "sample_ids" in batch:
        stats_tracker.scalar(segments_per_episode=batch.num_seqs / batch.num_samples)
    if sampled[1]:
        stats_tracker.rate(tokens_per_s=sampled)
    if TEACHER_SAMPLED in batch:  # its tokens have no version of the policy
        mask = mask & (batch["versions"] >= 0)
    if "versions" in batch and bool(mask.any()):
        staleness = version - batch["versions"][mask].float()
        stats_tracker.scalar(staleness=float(staleness.mean()), staleness_max=float(staleness.max()))


def rollout_batch(
    engine: InferenceEngine,
    thread: LoopThread,
    data: Sequence[Mapping[str, Any]],
    workflow: RolloutWorkflow,
    timeout_s: float,
    attend: Attend[list[Episode]] | None = None,
) -> tuple[PackedBatch, list[Episode]]:
    """Runs the episodes of `data` on `thread`, waits for them and packs their groups in the order of `data`.

    `attend` may supervise the wait and end it, and the episodes, with an error of its own.
    """
    if not data:
        raise UserError("rollout_batch got no prompts; give it at least one")
    start = time.perf_counter()
    with stats_tracker.scope("rollout"):
        what = f"{type(workflow).__name__} on {len(data)} prompts"
        work = run_episodes(engine, data, workflow)
        episodes = thread.run(attend(work) if attend is not None else work, timeout_s, what)
        batch = assemble(episodes)
        sampled = float(batch["loss_mask"].sum()), time.perf_counter() - start
        record_stats(episodes, batch, engine.get_version(), sampled)
    return batch, episodes


def _excerpt(item: Mapping[str, Any]) -> str:
    """The prompt of a data item in at most about 100 characters, for error messages."""
    messages = item.get("messages")
    text = messages[-1].get("content", "") if isinstance(messages, list) and messages else str(dict(item))
    return repr(text if len(text) <= 100 else text[:97] + "...")
