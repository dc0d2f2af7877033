"""Reward functions in separate processes: hangs, crashes and hostile completions cost one sample each."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from megarl.knobs import UserError
from megarl.rewards import REWARDS, reward_fn_of
from megarl.rewards import pool as pool_module
from megarl.rewards.lists import ListReward
from megarl.rewards.pool import RewardConfig, RewardPool
from megarl.sandbox.activity import worked_s
from megarl.types import RewardError
from tests.own_children import own_children
from tests.unit.rewards.busy_machine import loops_beside
from tests.unit.rewards.functions import double, halve, knows_math_verify
from tests.unit.rewards.hostile import HOSTILE

DEADLINE_S = 400.0  # for a call that is never answered


def run(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(call(), DEADLINE_S))


def children() -> set[int]:
    return {child.pid for child in own_children("megarl.rewards.worker", recursive=True)}


def test_a_thousand_rewards_of_which_many_fail_leave_the_others_exact() -> None:
    kinds = ["hang"] * 50 + ["raise"] * 50 + ["exit"] * 20 + [""] * 880
    random.Random(0).shuffle(kinds)

    async def score_all() -> list[Any]:
        calls = (pool("p" * 200, "c" * 200, [1], [2], i=i, what=kind) for i, kind in enumerate(kinds))
        return await asyncio.gather(*calls, return_exceptions=True)

    with RewardPool([double], RewardConfig(time_limit_s=5.0)) as pool:
        results = run(score_all)
        assert dict(pool.failures) == {"time": 50, "raised": 50, "died": 20}
    for i, (kind, result) in enumerate(zip(kinds, results, strict=True)):
        if kind:
            assert isinstance(result, RewardError)
        else:
            assert result == 2.0 * i
    assert not children()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", "ValueError: no 7"),
        ("sys.exit", "SystemExit"),
        ("memory", "MemoryError"),
        ("nan", "not a finite number"),
        ("text", "functions.double failed, TypeError: it returned the text '1.0'; return a number"),
        ("none", "no reward function applies"),
        ("exit", "died"),
        ("hang", r"rewards.time_limit_s=2$"),
        ("longer than the limit", "rewards.time_limit_s=2"),
    ],
)
def test_a_failure_is_named_and_the_pool_goes_on(what: str, message: str) -> None:
    async def both() -> float:
        with pytest.raises(RewardError, match=message):
            await pool("", "", [], [], i=7, what=what)
        return await pool("", "", [], [], i=7)

    limits = RewardConfig(time_limit_s=2.0 if message.startswith("rewards") else 60.0, memory_limit_mb=1024)
    with RewardPool([double], limits) as pool:
        assert run(both) == 14.0


@pytest.mark.parametrize("completions", [1, 2])
def test_a_call_has_its_limit_for_each_completion_and_no_longer(
    completions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test says how long the call has taken."""
    looks: list[float] = []
    spent_s = 1.9 * completions

    def scoring_s(worker: pool_module._Worker) -> float:
        looks.append(spent_s)
        return spent_s

    async def both() -> float:
        nonlocal spent_s
        data = {"i": 7, "what": "hang"}
        work = pool.score_group("", [], ["a"] * completions, [[1]] * completions, data)
        call = asyncio.ensure_future(work)
        while looks.count(spent_s) < 3:
            await asyncio.sleep(0.01)
        assert not call.done()
        spent_s = 2.1 * completions
        results = await asyncio.wait_for(call, 120)
        assert ["rewards.time_limit_s=2" in str(result) for result in results] == [True] * completions
        return 14.0

    monkeypatch.setattr(pool_module._Worker, "scoring_s", scoring_s)
    with RewardPool([double], RewardConfig(time_limit_s=2.0)) as pool:
        assert run(both) == 14.0


def test_an_answer_that_came_while_the_trainer_did_not_go_on_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's process stops as it looks at a call, until the call is over its limit and answered."""

    def scoring_s(worker: pool_module._Worker) -> float:
        select.select([worker.writer.get_extra_info("socket")], [], [], 300)
        return 1000.0

    async def two() -> list[Any]:
        return [await pool("", "", [], [], i=7, what="half a second of work") for _ in range(2)]

    monkeypatch.setattr(pool_module._Worker, "scoring_s", scoring_s)
    with RewardPool([double], RewardConfig(time_limit_s=2.0)) as pool:
        assert run(two) == [14.0, 14.0]
        assert not pool.failures


@pytest.mark.skipif(worked_s() == 0.0, reason="this kernel has no scheduler statistics, so all time counts")
def test_time_in_line_for_a_processor_does_not_count() -> None:
    """Six loops a core run beside a reward that needs a third of its limit."""

    async def both() -> float:
        value = await pool("", "", [], [], i=7, what="half a second of work")
        with pytest.raises(RewardError, match=r"rewards.time_limit_s=1.5$"):
            await pool("", "", [], [], i=7, what="hang")
        return float(value)

    with RewardPool([double], RewardConfig(time_limit_s=1.5)) as pool, loops_beside(6):
        assert run(both) == 14.0


def test_a_failing_group_has_an_error_for_each_completion() -> None:
    async def group(what: str) -> list[Any]:
        return await pool.score_group("", [], ["a", "b"], [[1], [2]], {"i": 7, "what": what})

    async def both() -> list[Any]:
        return [*await group("raise"), *await group("exit")]

    with RewardPool([double], RewardConfig(time_limit_s=60.0)) as pool:
        errors = run(both)
        assert dict(pool.failures) == {"raised": 2, "died": 1}, "each error of a function, each death of a process"
    assert all(isinstance(error, RewardError) for error in errors)
    assert ["no 7" in str(error) for error in errors] == [True, True, False, False]


def test_memory_below_the_limit_is_given() -> None:
    with RewardPool([double], RewardConfig(memory_limit_mb=1024, time_limit_s=300.0)) as pool:
        assert run(lambda: pool("", "", [], [], i=7, what="less memory")) == 14.0


def test_what_imports_have_mapped_does_not_count_to_the_limit() -> None:
    from tests.unit.rewards.large_imports import half

    with RewardPool([half], RewardConfig(memory_limit_mb=1024)) as pool:
        assert run(lambda: pool("", "", [], [])) == 0.5


def test_slow_imports_of_a_reward_happen_before_the_fork() -> None:
    with RewardPool([knows_math_verify, REWARDS["math"]], RewardConfig(functions=["a", "b"])) as pool:
        assert run(lambda: pool.score("", "none", [], [], answer="1")) == [1.0, 0.0]


def test_several_rewards_are_weighted_and_async_ones_awaited() -> None:
    async def both() -> tuple[float, list[float]]:
        return await pool("", "", [], [], i=8), await pool.score("", "", [], [], i=8)

    with RewardPool([double, halve], RewardConfig(functions=["a", "b"], weights=[1.0, 0.5])) as pool:
        assert run(both) == (18.0, [16.0, 4.0])


def test_a_cancelled_call_ends_its_process_and_frees_its_slot() -> None:
    async def cancel() -> float:
        task = asyncio.create_task(pool("", "", [], [], i=1, what="hang"))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await pool("", "", [], [], i=1)

    with RewardPool([double], RewardConfig(workers=1, max_workers=1)) as pool:
        assert run(cancel) == 2.0


def test_concurrent_calls_do_not_wait_for_one_that_hangs() -> None:
    async def score_all() -> list[float]:
        hanging = asyncio.create_task(pool("", "", [], [], i=0, what="hang"))
        others = await asyncio.gather(*(pool("", "", [], [], i=i) for i in range(1, 20)))
        assert not hanging.done()
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        return [float(other) for other in others]

    with RewardPool([double], RewardConfig(workers=1, time_limit_s=60.0)) as pool:
        assert run(score_all) == [2.0 * i for i in range(1, 20)]
        assert not pool.failures


def test_signals_to_all_processes_of_a_job_do_not_stop_rewards() -> None:
    async def score_all() -> list[Any]:
        await pool("p", "c", [1], [2], i=0, what="")
        for pid in children():
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        return await asyncio.gather(*(pool("p", "c", [1], [2], i=i, what="") for i in range(20)))

    with RewardPool([double], RewardConfig()) as pool:
        assert run(score_all) == [2.0 * i for i in range(20)]
        assert not pool.failures


def test_functions_of_the_calling_script_need_no_module() -> None:
    factor = 3.0
    with RewardPool([lambda prompt, completions, prompt_ids, completion_ids: factor * len(completions)]) as pool:
        assert run(lambda: pool("", "four", [], [])) == 12.0


def test_hostile_completions_are_judged_and_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(HOSTILE) >= 60
    judges = [REWARDS["math"], REWARDS["gsm8k"], REWARDS["gsm8k_flexible"], REWARDS["think_format"]]

    async def judge_all() -> None:
        for text in HOSTILE:
            values = await pool.score("", text, [], [], answer=r"\boxed{\sqrt{7}} #### 31337")
            assert values == [0.0, 0.0, 0.0, 0.0], text[:80]

    with RewardPool(judges, RewardConfig(functions=["a"] * 4, workers=1, max_workers=1, time_limit_s=300.0)) as pool:
        run(judge_all)
        assert not pool.failures
    assert list(tmp_path.iterdir()) == []


def test_a_reward_that_cannot_be_loaded_is_refused_at_once() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            return (__import__, ("no_such_module_at_all",))

    with pytest.raises(UserError, match="no_such_module_at_all"):
        RewardPool([Stubborn()])  # type: ignore[list-item]
    assert not children()


def test_batched_reward_functions_are_called_with_lists_of_one() -> None:
    def lengths(completions: list[str], answers: list[str], **_: Any) -> list[float]:
        return [float(len(c) + len(a)) for c, a in zip(completions, answers, strict=True)]

    assert ListReward(lengths)("p", "four", [], [], answer="six") == 7.0


def test_a_custom_reward_is_imported_by_module_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_here.py").write_text("def half(completions, **_): return [0.5 for _ in completions]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert reward_fn_of("my_rewards_here.half")("", "", [], []) == 0.5
    for name, message in {
        "gsm9k": "none of gsm8k",
        "no_module_here.f": "cannot be imported",
        "my_rewards_here.other": "cannot be imported",
    }.items():
        with pytest.raises(UserError, match=message):
            reward_fn_of(name)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"functions": []}, "functions is empty"),
        ({"weights": [1.0, 2.0]}, "weights has 2 values and rewards.functions 1"),
        ({"time_limit_s": 0.0}, "time_limit_s=0.0 must be above 0"),
        ({"memory_limit_mb": 1}, "memory_limit_mb=1"),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"workers": 9, "max_workers": 8}, "workers=9"),
    ],
)
def test_knobs_that_cannot_work_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardConfig(**knobs)


@pytest.mark.parametrize("name", ["os.system", "os.getpid", "builtins.max", "os.path.join"])
def test_a_function_that_takes_no_completions_is_refused_before_it_is_called(name: str) -> None:
    with pytest.raises(
        UserError, match=f"rewards.functions: {name} is no reward function: it takes neither prompt_ids"
    ):
        reward_fn_of(name)
