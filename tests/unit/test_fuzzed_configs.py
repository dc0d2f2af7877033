"""Random overrides of every knob: a command takes them or refuses them in one line, and never ends in a traceback."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from megarl import cli
from megarl.knobs import Range, override
from megarl.preflight import report
from tests.exit_codes import exit_code, reads_its_configuration
from tests.fuzzing import LONG_LIMIT_S

KNOBS = cli.knob_paths()
RECIPES = sorted(path.stem for path in (cli.CONFIGS / "experiment").glob("*.yaml"))
GROUPS = {
    group: sorted(path.stem for path in (cli.CONFIGS / group).glob("*.yaml"))
    for group in ("algorithm", "parallel", "model", "data")
}
NUMBERS = (
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "8",
    "16",
    "64",
    "1000",
    "4096",
    "0.5",
    "1e-9",
    "1e9",
    "1e25",
    "nan",
    "inf",
    "-inf",
)
HUGE = ("9" * 40, "-" + "9" * 400, "9" * 5000, "1e400", str(2**31), str(2**63))
TEXTS = (
    "x", "''", "' '", "null", "~", "true", "false", "auto", "none", "[]", "[1]", "[a,b]", "['']", "{}", "{a:1}", "[[]]",
    "'a\0b'", "'\ud800'", "'\x1b[2J'", "../..", "/", "a/b", "é", "$x", "${seed}", "${nothing}", "a.b",
    "os.system", "x" * 300,
    "'" + "y/" * 3000 + "'", "arithmetic", "-", "???", "'1'", "1:2", "\\\\", "'\n'",
)  # fmt: skip
SERVER_ARGUMENTS = (
    "mem_fraction_static",
    "ep_size",
    "context_length",
    "attention_backend",
    "max_running_requests",
    "nothing",
)


def overrides_of(seed: int) -> list[str]:
    """A command line of some recipe, groups and knobs; most numbers and choices are inside their ranges."""
    draw = random.Random(seed)
    arguments = [f"+experiment={draw.choice(RECIPES)}"] if draw.random() < 0.9 else []
    arguments += [f"{group}={draw.choice(names)}" for group, names in GROUPS.items() if draw.random() < 0.08]
    for path in draw.sample(sorted(KNOBS), draw.choice((1, 1, 1, 2, 4))):
        declared: Range = KNOBS[path].metadata["range"]
        if draw.random() < 0.7 and declared.choices:
            arguments.append(f"{path}={draw.choice(declared.choices)}")
        elif draw.random() < 0.7 and declared.most is not None:
            ends = [end for end in (declared.least, declared.above, declared.most, declared.below) if end is not None]
            arguments.append(f"{path}={draw.choice([*ends, draw.uniform(*ends), int(draw.uniform(*ends)), 2, 4])}")
        elif declared.most is None or draw.random() < 0.5:
            arguments.append(f"{path}={draw.choice(draw.choice((NUMBERS, NUMBERS, HUGE, TEXTS, TEXTS)))}")
    if draw.random() < 0.2:
        arguments.append(f"+sglang.{draw.choice(SERVER_ARGUMENTS)}={draw.choice((*NUMBERS, *TEXTS))}")
    if draw.random() < 0.1:
        arguments.append(override("train_dataset.sources", [{"path": "a", "weight": draw.choice((-1, 0, 2, "x"))}]))
    return arguments


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command as `python -m` does. Returns its exit code and its standard error."""

    def command(main: Callable[[list[str]], int], arguments: list[str]) -> tuple[int, str]:
        return exit_code(main, arguments, monkeypatch), capsys.readouterr().err

    return command


def check_seeds(seeds: range, run: Callable[..., tuple[int, str]]) -> list[int]:
    """Reads the configuration of each seed's command line, and has preflight plan those that can be read."""
    codes = []
    for seed in seeds:
        arguments = overrides_of(seed)
        code, text = run(reads_its_configuration, arguments)
        assert code in (0, 2), (seed, arguments, text)
        lines = text.splitlines()
        assert len(lines) == (code == 2), (seed, arguments, text)
        assert all(line.startswith("megarl: ") and len(line) < 2000 for line in lines), (seed, arguments, text)
        codes.append(code)
        if seed % 4 == 0:
            code, text = run(report.command, [*arguments, "show=batch"])
            assert code in (0, 1, 2), (seed, arguments, text)
            assert len(text.splitlines()) == (code == 2), (seed, arguments, text)
    return codes


def test_random_command_lines_are_read_or_refused_in_one_line(run: Callable[..., tuple[int, str]]) -> None:
    codes = check_seeds(range(60), run)
    assert codes.count(0) > 10
    assert codes.count(2) > 10


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_thousands_of_random_command_lines_are_read_or_refused_in_one_line(
    part: int, run: Callable[..., tuple[int, str]]
) -> None:
    check_seeds(range(1000 + 300 * part, 1300 + 300 * part), run)


@pytest.mark.long
@pytest.mark.timeout(LONG_LIMIT_S)
@pytest.mark.parametrize(
    "arguments",
    [
        ["+experiment=grpo_70b", "server.n_servers=4096", "server.tp_size=1", "parallel.dp_size=512"],
        ["+experiment=grpo_moe_235b", "server.n_servers=1024", "server.tp_size=4", "parallel.dp_size=256"],
    ],
)
def test_the_plan_of_the_largest_runs_takes_less_than_2_gb(arguments: list[str]) -> None:
    code = (
        "import resource, sys\nfrom megarl.preflight import report\n"
        f"report.command({[*arguments, 'train_dataset.batch_size=65536']!r})\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=LONG_LIMIT_S
    )
    assert int(result.stdout.splitlines()[-1]) < 2e9
    assert "Layout" in result.stdout
