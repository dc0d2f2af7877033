"""The page of a run: its content, that it loads nothing, and that text of a model is escaped."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megarl.knobs import UserError
from megarl.observe.page import write_page

EVIL = "<script>document.title='owned'</script>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "demo" / "2026-01-01"
    (folder / "evaluations").mkdir(parents=True)
    rows = [
        {
            "step": s,
            "rollout/reward": 0.1 * s,
            "train/loss": float("nan") if s == 2 else 1.0,
            "time_s/update": 0.5,
            "time_s/rollout": s / 2,
        }
        for s in range(1, 5)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(
        json.dumps({"experiment": "demo", "steps": 4, "wall_s": 75.0, "accuracy_before": 0.4, "accuracy_after": 0.65})
    )
    (folder / "config.yaml").write_text("experiment_name: demo\n")
    episodes = [
        {"prompt_id": "0", "samples": 2, "rewards": [1, 0]},
        {"prompt_id": "1", "rejected": "timed out"},
        {"prompt_id": "2", "samples": 1, "dropped": {"reward failed": 3}},
    ]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in episodes))
    samples = [
        {
            "step": 4,
            "problem": n,
            "prompt": f"question {n}",
            "completion": EVIL if n == 0 else "four",
            "reward": float(n),
            "solved": n > 0,
            "versions": [3, 4],
        }
        for n in range(3)
    ]
    (folder / "evaluations" / "step-000004.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    return folder


class Reader(HTMLParser):
    """Collects the text, and every address that the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(v) for k, v in attrs if k in ("src", "href") and not str(v).startswith("#")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_shows_the_run_and_loads_nothing(run: Path) -> None:
    page = write_page(run)
    assert page == run / "report.html"
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    assert reader.loads == []
    text = " ".join(reader.text)
    for expected in (
        "demo",
        "40.0% → 65.0%",
        "1m15s",
        "2 prompts trained on",
        "prompt rejected: timed out",
        "sample left out: reward failed",
        "question 2",
        "experiment_name: demo",
    ):
        assert expected in text, expected
    assert page.read_text(encoding="utf-8").count("<svg") == 3  # reward, loss, timings


def test_seconds_of_a_line_of_several_steps_are_shown_for_one(run: Path) -> None:
    lines = [{"step": step, "time_s/update": 3.0} for step in (2, 8)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = "<tr><td>update</td><td>1.500</td><td>1.500</td><td>6.0</td></tr>"
    assert row in write_page(run).read_text(encoding="utf-8")


def test_text_of_a_model_is_escaped(run: Path) -> None:
    text = write_page(run).read_text(encoding="utf-8")
    assert EVIL not in text
    assert "&lt;script&gt;" in text


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl; give the folder of a run"):
        write_page(tmp_path)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_the_samples_and_filters_them(run: Path, tmp_path: Path) -> None:
    page = write_page(run)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{page}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.search(r'<span id="count">3 of 3</span>', dom)
    assert "<title>demo: megarl run</title>" in dom


def test_the_median_of_a_stage_is_over_the_steps_that_had_it(run: Path) -> None:
    lines = [
        {"step": step, "time_s/update": 1.0} | ({"time_s/evaluate": 8.0} if step == 4 else {}) for step in range(1, 5)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "<tr><td>evaluate</td><td>8.000</td><td>8.000</td><td>8.0</td></tr>" in write_page(run).read_text("utf-8")


def test_a_legend_has_words_and_not_the_keys_of_metrics(run: Path) -> None:
    lines = [{"step": step, "rollout/tokens_per_s": 5.0, "train/tokens_per_s": 7.0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_page(run).read_text(encoding="utf-8")
    assert "<!-- training -->" in text  # matplotlib writes the text of a label beside its outlines
    assert "tokens_per_s" not in text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_on_a_narrow_screen_prompts_keep_a_width_that_can_be_read(run: Path, tmp_path: Path) -> None:
    page = write_page(run)
    measure = (
        "<iframe id='f' style='width:400px;height:900px' srcdoc=''></iframe><p id='widths'></p><script>"
        "const f = document.getElementById('f'); f.onload = () => { const d = f.contentDocument;"
        "document.getElementById('widths').textContent = 'widths ' + [2, 3].map(n => "
        "Math.round(d.querySelector(`#samples td:nth-child(${n})`).getBoundingClientRect().width)) + ' page ' + "
        "d.documentElement.scrollWidth; }; f.srcdoc = document.getElementById('page').textContent;</script>"
    )
    text = page.read_text(encoding="utf-8").replace("</script>", "<\\/script>")
    frame = tmp_path / "frame.html"
    frame.write_text(f"<script type='text/plain' id='page'>{text}</script>{measure}", encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=5000",
        "--dump-dom",
        f"file://{frame}",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r"widths (\d+),(\d+) page (\d+)", shown)
    assert found, shown[-2000:]
    assert min(int(found[1]), int(found[2])) >= 200, found[0]
    assert int(found[3]) <= 400, found[0]  # the table scrolls, not the page
