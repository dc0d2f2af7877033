"""`make gpu-acceptance` without a GPU: its plan, its runner, its report and the table that it fills.

Every figure here is made up, and every page that is written is a copy. tests/e2e/test_acceptance_steps.py runs the
scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_acceptance
import linear_logprobs
import psutil
import pytest
import timing
from acceptance import deterministic_run, layer_backends, report, runner, table
from acceptance.plan import (
    BUDGET_S,
    GPU_COUNTS,
    JSON_LINES,
    JUNIT,
    OPTIONAL_PARTS,
    ROOT,
    Machine,
    Step,
    overrides,
    plan,
)

from megarl import cli
from megarl.rollout.servers.sglang_server import still_running

SCRIPT = ROOT / "benchmarks" / "gpu_acceptance.py"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300, env=environment
    )


# --- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "skipped"), [(1, {"transport nccl", "grpo apart"}), (2, set()), (8, set())], ids=["1", "2", "8"]
)
def test_a_dry_run_prints_every_step_with_its_command_deadline_and_proof(gpus: int, skipped: set[str]) -> None:
    done = command("--dry-run", "--gpus", str(gpus))
    assert done.returncode == 0, done.stderr
    steps = plan(Machine(gpus, OPTIONAL_PARTS))
    for step in steps:
        assert f"{step.name} (at most {step.deadline_s:g} s): {step.proves}" in done.stdout
        assert (f"skipped: {step.skip}" if step.skip else step.shown()) in done.stdout
    assert {step.name for step in steps if step.skip} == skipped
    transports = {f"transport {name}" for name in ("gloo", "shm", "disk", "cuda_ipc", "nccl")}
    assert {"doctor", "build", "kernels", "backend te", "grpo apart", "grpo colocated"} | transports <= {
        step.name for step in steps
    }
    assert f"{len(steps)} steps, at most {BUDGET_S / 60:g} minutes" in done.stdout


def test_a_missing_part_skips_its_steps_with_the_way_to_get_it() -> None:
    reasons = {step.name: step.skip for step in plan(Machine(1, frozenset())) if "needs" not in step.skip}
    assert "requirements/build_gpu_packages.sh" in reasons["backend te"]
    assert "CUDA toolkit" in reasons["compute-sanitizer memcheck"]


def test_every_benchmark_that_takes_a_device_is_in_the_plan() -> None:
    commands = " ".join(step.shown() for step in plan(Machine(2, OPTIONAL_PARTS)))
    devices = ("each_device=True", '"--device"', "platform.device()")
    scripts = [path for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in ("timing", "gpu_acceptance")]
    take = [path.name for path in scripts if any(word in path.read_text() for word in devices)]
    assert len(take) >= 6
    assert [name for name in take if f"benchmarks/{name}" not in commands] == []


@pytest.mark.parametrize("gpus", GPU_COUNTS)
@pytest.mark.parametrize("layout", ["apart", "colocated"])
def test_the_runs_compose_and_fill_the_machine(gpus: int, layout: str) -> None:
    if gpus == 1 and layout == "apart":
        with pytest.raises(ValueError, match="needs 2 GPUs or more, not 1"):
            overrides(gpus, layout, 20)
        return
    config = cli.load([*overrides(gpus, layout, 20), f"actor.path={cli.ASSETS / 'tiny'}"])
    served = config.server.n_servers * config.server.tp_size
    used = max(config.parallel.world_size(), served)
    assert (used if layout == "colocated" else config.parallel.world_size() + served) == gpus


@pytest.mark.long
def test_every_script_of_the_plan_takes_its_arguments(tmp_path: Path) -> None:
    """Runs each script up to the end of `timing.parse`, all in one process."""
    commands = {
        tuple(step.with_figures(tmp_path / "figures")[1:])
        for gpus in (0, *GPU_COUNTS)
        for step in plan(Machine(gpus, OPTIONAL_PARTS), model="folder")
        if step.figures == JSON_LINES
    }
    assert len(commands) > 20
    parse_only = """
import json, runpy, sys, timing
class Parsed(Exception): pass
parse = timing.parse
def parse_only(parser, **options):
    parse(parser, **options)
    raise Parsed
timing.parse, timing.with_warm_allocator = parse_only, lambda: None
for command in json.loads(sys.argv[1]):
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Parsed:
        print("parsed")
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", parse_only, json.dumps(sorted(commands))],
        capture_output=True, text=True, timeout=600, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("parsed") == len(commands)


@pytest.mark.long
def test_the_sanitizers_subset_of_the_kernels_tests_exists() -> None:
    commands = [step.command for step in plan(Machine(1, OPTIONAL_PARTS)) if "sanitizer" in step.name]
    (arguments,) = {words[words.index("pytest") + 1 :] for words in commands}
    collect = [sys.executable, "-m", "pytest", "--collect-only", *arguments]
    done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]  # 5 where nothing is selected


def test_the_build_step_is_a_command_of_setuptools() -> None:
    build = next(step for step in plan(Machine(1, OPTIONAL_PARTS)) if step.name == "build")
    done = subprocess.run([*build.command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "--inplace" in done.stdout


def test_without_a_gpu_it_ends_in_one_line(tmp_path: Path) -> None:
    if gpu_acceptance.gpus_here():
        pytest.skip("this machine has a GPU")
    done = command("--out", str(tmp_path / "reports"))
    assert done.returncode == 2
    assert done.stderr == "gpu_acceptance: torch finds 0 GPUs, and a GPU must be here; see --dry-run\n"
    assert not (tmp_path / "reports").exists()
    assert command("--device", "cpu", "--model", "/nonexistent").returncode == 2


def test_of_four_gpus_two_are_used() -> None:
    assert [gpu_acceptance.largest_supported(count) for count in (0, 1, 2, 4, 8, 16)] == [0, 1, 2, 2, 8, 8]


# --- the runner ------------------------------------------------------------------------------------------------------


def python(name: str, code: str, deadline_s: float = 600, figures: str = "") -> Step:
    return Step(name, "made up", (sys.executable, "-c", code), deadline_s, figures)


def write_figures(text: str) -> str:
    """Code of a step that writes `text` to the file after `--json`."""
    return f"import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write({text!r})"


GOOD = json.dumps({"figure": "speed", "value": 2.5, "unit": "x", "device": "cuda"}) + "\n"


def test_failures_are_named_and_the_steps_behind_them_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        python("bad exit", "import sys; print('the cause'); sys.exit(3)"),
        Step("no command", "made up", ("/nonexistent/command",), 60),
        Step("not here", "made up", ("unused",), 60, skip="needs a GPU"),
        python("no figure", "pass", figures=JSON_LINES),
        python("half a figure", write_figures('{"figure": "speed"}\n'), figures=JSON_LINES),
        python("no json", write_figures("speed 2.5\n"), figures=JSON_LINES),
        python("good", write_figures(GOOD), figures=JSON_LINES),
    ]
    monkeypatch.setattr(gpu_acceptance, "plan", lambda machine, model: steps)
    args = argparse.Namespace(out=tmp_path, page=tmp_path, model="", only=[""])
    code = gpu_acceptance.accept(Machine(0, frozenset()), args)
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert lines[-1] == "FAILED    bad exit, no command, no figure, half a figure, no json"
    (folder,) = tmp_path.iterdir()
    found = {step["name"]: step for step in json.loads((folder / "report.json").read_text())["steps"]}
    assert found["bad exit"]["reason"] == "exit code 3: the cause"
    assert found["no command"]["reason"].startswith("exit code 127: ")
    assert (found["not here"]["status"], found["not here"]["reason"]) == ("skipped", "needs a GPU")
    assert found["no figure"]["reason"] == "it ended well and wrote no figure"
    assert "lacks unit, value" in found["half a figure"]["reason"]
    assert found["no json"]["reason"].startswith("its figures cannot be read")
    assert found["good"]["status"] == "passed"
    assert found["good"]["figures"] == [json.loads(GOOD)]
    assert "the cause" in (folder / found["bad exit"]["log"]).read_text()


def test_a_step_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grandchild leaves the step's session and ignores signals that it can."""
    grandchild = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    pids = tmp_path / "pids"
    code = (
        "import subprocess, sys, time, os\n"
        f"child = subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True)\n"
        f"open({str(pids)!r} + '.part', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids)!r} + '.part', {str(pids)!r})\n"
        "time.sleep(600)"
    )

    sleeps: list[float] = []  # the runner has set the deadline before it first sleeps

    def clock() -> float:
        """Its deadline passes once both processes run."""
        return time.monotonic() + 400 * (bool(sleeps) and pids.exists())

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    hangs, good = python("hangs", code, deadline_s=300), python("good", write_figures(GOOD), figures=JSON_LINES)
    results = runner.run_all([hangs, good], tmp_path)
    assert [result.status for result in results] == ["failed", "passed"]
    assert results[0].reason == "killed at its deadline of 300 s"
    left = [psutil.Process(pid) for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]
    assert still_running(left, 300) == []


def test_steps_share_the_time_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[-1], sleep=lambda seconds: now.append(now[-1] + seconds))
    monkeypatch.setattr(runner, "time", clock)
    hangs, late = python("hangs", "import time; time.sleep(600)", deadline_s=500), python("late", "pass")
    results = runner.run_all([hangs, late], tmp_path, budget_s=3)
    assert results[0].reason == "killed at its deadline of 3 s"
    assert results[1].reason == "not started: the steps before it took all 0.05 minutes"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("def test_one(): pass", "passed", ""),
        ("import pytest\ndef test_one(): pytest.skip('no GPU')", "failed", "no test ran: 1 were skipped"),
        ("def test_one(): assert 0", "failed", "exit code 1"),
    ],
)
def test_pytests_report_becomes_counts(body: str, status: str, reason: str, tmp_path: Path) -> None:
    """A step whose tests are all skipped proves nothing, though pytest ends well."""
    (tmp_path / "test_made_up.py").write_text(body)
    options = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path))
    command = (sys.executable, "-m", "pytest", *options)
    (result,) = runner.run_all([Step("tests", "made up", command, 900, JUNIT)], tmp_path)
    assert result.status == status, (tmp_path / result.log).read_text()
    assert result.reason.startswith(reason)
    assert sum(figure["value"] for figure in result.figures) == 1


def test_layers_that_are_further_from_float32_fail_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def made_up(folder: Path, batch: Any, backend: str, dtype: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        error = {"float32": 0.0, "bfloat16": 1e-3 * (error_of_te if backend == "te" else 1.0)}[dtype]
        return torch.full((4,), -1.0 + error), {"weight": torch.full((4,), 1.0 + error)}

    monkeypatch.setattr(layer_backends, "write_model", lambda folder, args: None)
    monkeypatch.setattr(layer_backends, "measure", made_up)
    monkeypatch.setattr(sys, "argv", ["layer_backends.py"])
    codes = {}
    for error_of_te in (0.5, 1.9, 2.1, float("nan")):
        codes[str(error_of_te)] = layer_backends.main()
    assert codes == {"0.5": 0, "1.9": 0, "2.1": 1, "nan": 1}


# --- the report and the table ----------------------------------------------------------------------------------------


def test_deterministic_runs_are_compared_in_every_bit_but_times() -> None:
    row = {"train/loss": 0.1, "time_s/update": 1.0, "time": 2.0, "rollout/tokens_per_s": 3.0, "rollout/truncated": 0.0}
    clock = {"time_s/update": 2.0, "time": 3.0, "rollout/tokens_per_s": 4.0, "rollout/truncated": 0.1}
    assert deterministic_run.different([row, row], [row, {**row, **clock}]) == []
    assert deterministic_run.different([row, row], [row, {**row, "train/loss": 0.1 + 1e-18}]) == []
    assert deterministic_run.different([row, row], [row, {**row, "train/loss": 0.1 + 2e-17}]) == ["step 2: train/loss"]
    assert deterministic_run.different([row], [{**row, "train/kl": 0.0}]) == ["step 1: train/kl"]
    assert deterministic_run.different([row, row], [row]) == ["2 steps, then 1"]


def made_up_report(device: str = "cuda") -> dict[str, Any]:
    """A report in which every figure of the table has the value 0.5, in the unit "x"."""
    steps: dict[str, list[dict[str, Any]]] = {}
    for row in table.ROWS:
        for figure in row.figures:
            steps.setdefault(figure.step, []).append(
                {"figure": figure.name, "value": 0.5, "unit": "x", **figure.labels}
            )
    outcome = {"proves": "made up", "command": "made up", "status": "passed", "reason": "", "seconds": 1.0, "log": "x"}
    return {
        "date": "2000-01-01", "device": device, "gpus": 1, "machine": "1 x Made-Up GPU", "driver": "0", "seconds": 1.0,
        "versions": {"torch": "0.0"}, "steps": [{"name": n, "figures": f, **outcome} for n, f in steps.items()],
    }  # fmt: skip


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return Path(shutil.copy(ROOT / "docs" / "numbers.md", tmp_path / "numbers.md"))


def fill(facts: dict[str, Any], page: Path) -> str:
    path = page.with_name("report.json")
    path.write_text(json.dumps(facts))
    table.write_table(path, page)
    return page.read_text()


def rows_of(text: str) -> list[str]:
    inside = text.partition(table.BEGIN)[2].partition(table.END)[0]
    return [line for line in inside.splitlines() if line.startswith("| ")][2:]


def test_the_table_is_filled_in_a_copy_and_the_rest_of_the_page_stays(page: Path) -> None:
    before = page.read_text()
    filled = fill(made_up_report(), page)
    assert "Measured on 2000-01-01: 1 x Made-Up GPU; torch 0.0." in filled
    assert len(rows_of(filled)) == len(table.ROWS)
    for line, row in zip(rows_of(filled), table.ROWS, strict=True):
        assert line == f"| {row.what} | {row.goal} | {', '.join(['0.5x'] * len(row.figures))} |"
    for text in (before, filled):
        assert text.count(table.BEGIN) == text.count(table.END) == 1
    assert filled.partition(table.BEGIN)[0] == before.partition(table.BEGIN)[0]
    assert filled.partition(table.END)[2] == before.partition(table.END)[2]


def test_cells_without_a_figure_of_a_step_that_passed_stay_not_measured(page: Path) -> None:
    facts = made_up_report()
    for step in facts["steps"]:
        if step["name"] == "benchmark logprob":
            step["status"] = "failed"
        if step["name"] == "benchmark linear_logprobs":
            step["figures"] = [f for f in step["figures"] if f["figure"] != "time over materialising"]
    fill(made_up_report(), page)
    lines = rows_of(fill(facts, page))  # a later report replaces the earlier one's figures
    assert lines[0].endswith("| 85% | not measured |")
    loss = next(line for line in lines if line.startswith("| `linear_token_loss`: time over all logits"))
    assert loss.endswith("| not measured, 0.5x |")
    facts["steps"] = []
    assert {line.rsplit("| ", 1)[1] for line in rows_of(fill(facts, page))} == {"not measured |"}


def test_every_public_kernel_has_a_pinned_version_and_a_row() -> None:
    pinned = (ROOT / "requirements" / "peers.txt").read_text()
    versions = re.findall(r"^([\w-]+)==\d+\.\d+\.\d+$", pinned, re.M)
    assert {name.replace("-kernels", "").replace("-", "_") for name in versions} == {
        package for package, _ in linear_logprobs.PEERS.values()
    }
    routes = {str(figure.labels.get("route")) for row in table.ROWS for figure in row.figures}
    assert linear_logprobs.PEERS.keys() <= routes


def test_the_fastest_public_kernel_is_the_one_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "_figures", tmp_path / "figures")
    seconds = {"materialising": 1.0, "token_loss": 1.2, "logprobs": 0.1, "liger": 1.5, "quack": 0.8}
    linear_logprobs.report("cuda", seconds, dict.fromkeys(seconds, 10), 100)
    found = [json.loads(line) for line in (tmp_path / "figures").read_text().splitlines()]
    (over,) = [figure for figure in found if figure["figure"] == "time over the best public kernel"]
    assert (over["value"], over["best"], over["route"]) == (pytest.approx(1.5), "quack", "token_loss")
    assert "token_loss takes 1.50x the time of quack, the best of liger, quack" in capsys.readouterr().out
    del seconds["liger"], seconds["quack"]
    linear_logprobs.report("cuda", seconds, dict.fromkeys(seconds, 10), 100)
    assert "the best of" not in capsys.readouterr().out


def test_a_kernel_that_is_not_installed_is_left_out_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(linear_logprobs, "PEERS", {"made_up": ("made_up_kernels", linear_logprobs.quack)})
    assert linear_logprobs.peaks_of_peers(argparse.Namespace()) == {}
    line = "made_up is left out: made_up_kernels is not installed: requirements/peers.txt\n"
    assert capsys.readouterr().out == line


def test_only_figures_of_gpus_fill_a_page_that_has_the_table(page: Path) -> None:
    with pytest.raises(ValueError, match="measured on cpu"):
        fill(made_up_report(device="cpu"), page)
    page.write_text(page.read_text().replace(table.END, ""))
    with pytest.raises(ValueError, match="does not have one table"):
        fill(made_up_report(), page)


def test_the_repositorys_page_has_the_tables_rows_and_no_made_up_figure() -> None:
    text = (ROOT / "docs" / "numbers.md").read_text()
    assert "Made-Up" not in text
    expected = [row.line({}).rsplit("| ", 1)[0] for row in table.ROWS]
    assert [line.rsplit("| ", 1)[0] for line in rows_of(text)] == expected


def test_the_report_has_every_figure_the_machine_and_the_results(tmp_path: Path) -> None:
    facts = made_up_report()
    facts["steps"][0] |= {"status": "failed", "reason": "<b>exit code 1</b>"}
    paths = {path.suffix: path.read_text() for path in report.write(facts, tmp_path)}
    assert report.failed(facts) == [facts["steps"][0]["name"]]
    assert json.loads(paths[".json"]) == facts
    for text in (paths[".md"], paths[".html"]):
        assert "1 x Made-Up GPU" in text
        assert text.count("0.5x") == sum(len(step["figures"]) for step in facts["steps"])
    assert "<b>exit code 1" not in paths[".html"]
    assert "<td class='wrong'>failed</td>" in paths[".html"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.874, "share", "87.4%"),
        (1.2e-7, "nats", "1.2e-07 nats"),
        (2.5, "x", "2.5x"),
        (12345.6, "tokens/s", "12,346 tokens/s"),
        (24, "parts", "24 parts"),
        (0.0213, "s", "0.0213 s"),
    ],
)
def test_figures_are_shown_with_their_unit(value: float, unit: str, text: str) -> None:
    assert report.shown(value, unit) == text


def test_only_the_steps_of_the_given_names_are_taken_and_an_unknown_name_is_refused() -> None:
    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_acceptance.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    shown = ask("--dry-run", "--gpus", "1", "--only", "transport s", "grpo c").stdout
    assert re.findall(r"^ ?\d+\. ([\w ]+) \(", shown, re.M) == ["transport shm", "grpo colocated"]
    refused = ask("--device", "cpu", "--only", "nothing")
    assert refused.returncode == 2
    assert "--only 'nothing' begins no step" in refused.stderr
