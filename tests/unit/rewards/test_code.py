"""The reward for code: unit tests that run in the sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megarl.rewards import code
from megarl.rewards.code import code_reward_fn, extract_code
from megarl.rewards.pool import RewardConfig, RewardPool
from megarl.sandbox import client
from megarl.sandbox.activity import worked_s
from megarl.types import RewardError
from tests.unit.rewards.busy_machine import loops_beside

ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
ECHO = "```python\nprint(int(input()) * 2)\n```"


def test_the_last_block_of_python_is_the_program() -> None:
    assert extract_code("```python\na\n```\n```py\nb\n```") == "b\n"
    assert extract_code("print(1)") == "print(1)"


def test_the_reward_is_the_fraction_of_tests_that_pass() -> None:
    tests: list[dict[str, str] | str] = [
        "assert add(1, 2) == 3",
        "assert add(1, 1) == 3",
        "assert add('a', 'b') == 'ab'",
    ]
    assert code_reward_fn("", ADD, [], [], tests=tests) == pytest.approx(2 / 3)


def test_programs_may_read_stdin_and_write_stdout() -> None:
    tests: list[dict[str, str] | str] = [{"input": "4", "output": "8\n"}, {"input": "5", "output": "11"}]
    assert code_reward_fn("", ECHO, [], [], tests=tests) == 0.5


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "def add(a, b): exit()",
        "while True: pass",
        "(",
    ],
)
def test_a_program_that_exits_early_does_not_pass(code: str) -> None:
    assert code_reward_fn("", f"```python\n{code}\n```", [], [], tests=["assert add(1, 2) == 3"]) == 0.0


TEST = "assert add(1, 2) == 3"


@pytest.mark.parametrize(
    "program",
    [
        "import sys\ndef add(a, b):\n    f = sys._getframe(1)\n    print(*f.f_code.co_consts, end='')\n    exit()",
        "class E(int):\n    def __eq__(self, other): return True\ndef add(a, b): return E()",
        "import sys\nsys.exit('sandbox: Landlock: Function not implemented')",
        "import sys\nprint('sandbox: x', file=sys.stderr)",
        "import os\nfor n in range(1, 9):\n    try: os.write(n, b'sandbox: x')\n    except OSError: pass",
    ],
    ids=["constants of the frame", "always equal", "exit message", "stderr", "every descriptor"],
)
def test_a_forged_verdict_or_error_scores_0(program: str) -> None:
    for tests in ([TEST], [{"input": "", "output": "3"}]):
        assert code_reward_fn("", program, [], [], tests=tests) == 0.0


def test_a_sample_reaches_its_limit_of_processor_time_before_the_pools_limit() -> None:
    assert code.TEST_LIMIT_S < code.SAMPLE_LIMIT_S
    assert RewardConfig().time_limit_s >= code.SAMPLE_LIMIT_S + code.TEST_LIMIT_S


def test_tests_after_the_samples_limit_count_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "SAMPLE_LIMIT_S", 0.1)
    monkeypatch.setattr(code, "TEST_LIMIT_S", 0.5)
    slow = "def add(a, b):\n    while a == 0: pass\n    return a + b"
    tests: list[dict[str, str] | str] = [TEST, "assert add(0, 1) == 1", TEST, TEST]
    assert code_reward_fn("", slow, [], [], tests=tests) == 0.25


def test_a_sample_out_of_wall_time_is_left_out_and_not_scored_0() -> None:
    def loops(*_: Any, tests: list[Any], **__: Any) -> float:

        client.LEAST_WALL_S, client.WALL_PER_CPU_S = 0.5, 0.0
        code.TEST_LIMIT_S = 300.0
        return code_reward_fn("", "while True: pass", [], [], tests=tests)

    async def both() -> float:
        for tests in ([TEST], [{"input": "", "output": ""}]):
            with pytest.raises(RewardError, match=r"TimeoutError: a test had \d+\.\d of 300 s of processor time"):
                await pool("", "", [], [], tests=tests)
        return pool.failures["raised"]

    with RewardPool([loops], RewardConfig(functions=["code"], time_limit_s=300.0)) as pool:
        assert asyncio.run(both()) == 2


@pytest.mark.skipif(worked_s() == 0.0, reason="this kernel has no scheduler statistics, so sleep is not limited")
def test_a_program_that_sleeps_is_scored_0_and_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong program must not hide: by one long sleep, nor by short ones in each test until the pool's limit."""
    monkeypatch.setattr(code, "TEST_LIMIT_S", 0.5)
    for tests in ([TEST], [{"input": "", "output": "3"}]):
        assert code_reward_fn("", "import time\ntime.sleep(1000)", [], [], tests=tests) == 0.0
    monkeypatch.setattr(code, "TEST_LIMIT_S", 60.0)
    monkeypatch.setattr(code, "SAMPLE_LIMIT_S", 0.5)
    naps = "import time\ndef add(a, b):\n    time.sleep(1.8)\n    return a + b"
    assert code_reward_fn("", naps, [], [], tests=[TEST] * 4) == 0.25


def test_a_busy_machine_does_not_lower_a_reward() -> None:
    """Three loops a core run beside a program that needs most of its own processor time."""
    program = "import time\ndef add(a, b):\n    while time.process_time() < 1.0: pass\n    return a + b"
    with loops_beside(3):
        assert code_reward_fn("", program, [], [], tests=[TEST]) == 1.0
