import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from megarl.observe import metrics
from megarl.observe.progress import Progress, print_wrapped, sparkline, wrapped

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
STEP = {
    metrics.REWARD: 0.5,
    metrics.STALENESS: 0.0,
    metrics.ROLLOUT_TOKENS_PER_S: 1234.0,
    metrics.TRAIN_TOKENS_PER_S: 9876.0,
    metrics.SYNC_VERIFIED: 1.0,
    "time_s/rollout": 1.5,
    "time_s/train": 0.5,
}
PROGRAM = f"""
import time
from megarl.observe.progress import Progress
with Progress("demo", 10) as progress:
    progress.update(0, {{"eval/accuracy": 0.25}})
    progress.note("server is up")
    for step in range(1, 4):
        progress.update(step, {STEP!r})
    while True:
        time.sleep(0.05)  # short, because a signal just before a sleep is handled only after it
"""


def plain_lines(feed) -> list[str]:
    out = io.StringIO()
    with Progress("demo", 10, console=Console(file=out, width=200)) as progress:
        feed(progress)
    return out.getvalue().splitlines()


def test_without_a_terminal_each_step_is_one_line_without_control_codes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)

    def feed(progress: Progress) -> None:
        progress.update(0, {metrics.ACCURACY: 0.25})
        progress.update(1, STEP)
        progress.update(2, {**STEP, metrics.ACCURACY: 0.5, metrics.SYNC_VERIFIED: 0.0})

    lines = plain_lines(feed)
    assert len(lines) == 3
    assert lines[0] == "step 0/10  held-out accuracy 25.0% (step 0)  ETA after the first step"
    assert "step 1/10  reward 0.500  held-out accuracy 25.0% (step 0)  rollout tokens/s 1,234" in lines[1]
    assert "train tokens/s 9,876  staleness 0.00 versions  sync verified step 1" in lines[1]
    assert "time rollout 1.50s, train 0.50s  ETA 0s" in lines[1]
    assert "held-out accuracy 25.0% -> 50.0% (step 2)" in lines[2]
    assert "sync verified step 1" in lines[2]  # the last verified one
    assert "\x1b" not in "".join(lines)


def test_a_run_without_reward_shows_its_loss():
    lines = plain_lines(lambda progress: progress.update(1, {metrics.LOSS: 1.25, metrics.TRAIN_TOKENS_PER_S: 10.0}))
    assert lines[0].startswith("step 1/10  loss 1.2500  train tokens/s 10")


def test_the_eta_counts_only_steps_of_this_process(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with Progress("demo", 50, done_steps=40, console=Console(file=out, width=200)) as progress:
        now[0] += 30
        progress.update(40, {metrics.ACCURACY: 0.5})
        now[0] += 2
        progress.update(41, STEP)
    assert "ETA 18s" in out.getvalue().splitlines()[-1]


def run_in_terminal(stop: signal.Signals) -> tuple[str, int]:
    """Runs PROGRAM in a pseudo-terminal until `stop` ends it; returns its output and exit status."""
    main, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    output, stopped, deadline = "", False, time.monotonic() + 300
    try:
        while time.monotonic() < deadline:
            if not select.select([main], [], [], 0.5)[0]:
                continue
            try:
                output += os.read(main, 65536).decode(errors="replace")
            except OSError:  # the terminal's other end is closed
                break
            if "step 3/10" in output and not stopped:
                stopped = True
                process.send_signal(stop)
        return output, process.wait(timeout=300)
    finally:
        process.kill()
        os.close(main)


def test_ctrl_c_restores_the_terminal_and_keeps_the_last_view():
    output, status = run_in_terminal(signal.SIGINT)
    assert status == -signal.SIGINT
    assert HIDE_CURSOR in output
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)
    assert output.rindex("step 3/10") < output.rindex("KeyboardInterrupt")
    assert "server is up" in output
    for words in ("reward", "held-out accuracy", "rollout tokens/s", "staleness", "sync verified", "75%", "ETA"):
        assert words in output


def test_a_sparkline_covers_its_values_within_its_width():
    assert sparkline([0, 1], 10) == "▁█"
    assert sparkline([3.0] * 5, 10) == "▁▁▁▁▁"
    assert sparkline(list(range(100)), 8) == "▁▂▃▄▅▆▇█"


def test_a_line_is_wrapped_at_words_and_a_path_stays_whole() -> None:
    path = "/scratch/a-user/runs/gsm8k_grpo/2026-01-01_10-00-00/checkpoints"
    line = f"batch     32 prompts x 8 completions = 256 sequences a step, in {path}"
    shown = wrapped(line, 50)
    first, *rest = shown.splitlines()
    assert first == "batch     32 prompts x 8 completions = 256"
    assert all(text.startswith(" " * 10) for text in rest)
    assert rest[-1].strip() == path
    assert " ".join(shown.split()) == " ".join(line.split())


LINE = "batch     32 prompts x 8 completions = 256 sequences a step, in microbatches of at most 16384 tokens"


@pytest.mark.parametrize(("is_terminal", "lines"), [(True, 3), (False, 1)])
def test_only_a_terminal_gets_lines_of_its_width(
    is_terminal: bool, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    print_wrapped(LINE)
    printed = capsys.readouterr().out
    Progress("demo", 10, console=Console(file=(out := io.StringIO()), width=50, force_terminal=is_terminal)).note(LINE)
    for text in (printed, out.getvalue()):
        assert len(text.splitlines()) == lines
        assert " ".join(text.split()) == " ".join(LINE.split())
        assert lines == 1 or max(map(len, text.splitlines())) <= 50
