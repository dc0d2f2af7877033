"""The report of a run: its content, that it loads nothing, and that text of a model stays text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megarl.knobs import UserError
from megarl.observe.page import write_page
from tests.chromium import Chromium, needs_chromium

STATES = [("rank 0", "after weights", "step 4/4"), ("sglang-0", "", "\u202eevil <b>")]


class Reader(HTMLParser):
    """Collects what the page would load, its scripts and its data."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.data: dict[str, Any] = {}
        self._in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [str(v) for k, v in attrs if k in ("src", "href") and v != "data:,"]
        self._in_data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data = json.loads(data)
            self._in_data = False


def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as chromium:
        yield chromium


def test_the_page_holds_the_run_and_loads_nothing(run: Path) -> None:
    page = write_page(run, STATES)
    assert page == run / "report.html"
    reader = read(page)
    assert reader.loads == []
    assert reader.tags.count("script") == 2  # ours and the data
    answers = reader.data["answers"]
    assert ["held-out accuracy", "40.0% → 65.0%"] in answers["run"]["facts"]
    assert ["wall time", "1m15s"] in answers["run"]["facts"]
    assert answers["run"]["accounts"] == {
        "trained": 2,
        "reasons": [["sample left out: reward failed", 3], ["prompt rejected: timed out", 1]],
    }
    assert answers["curves"]["series"]["train/loss"] == [[1, 3, 4], [1, 1, 1]]
    assert [sample["reward"] for sample in answers["samples"]["step-000004"]] == [0, 1, 2]
    assert answers["run"]["config"] == "experiment_name: demo\n"
    assert answers["timeline"]["first"] == 2
    assert answers["timeline"]["last"] == 4


def test_the_trace_beside_the_page_is_one_json_document_of_all_ranks(run: Path) -> None:
    write_page(run)
    trace = json.loads((run / "trace.json").read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    updates = [event for event in trace["traceEvents"] if event["name"] == "update"]
    assert len(updates) == 8  # four steps of two ranks
    assert all(event["dur"] == 1_000_000 for event in updates)


def test_text_of_a_model_cannot_end_the_block_that_holds_it(run: Path) -> None:
    text = write_page(run, STATES).read_text(encoding="utf-8")
    assert "owned" in text
    assert not re.search(r"</script>\s*<script>document", text)
    assert "\u202e" not in text
    block = text.split("id='data'>")[1].split("</script>")[0]
    assert not set("<>&") & set(block)


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl; give the folder of a run"):
        write_page(tmp_path)


def test_a_damaged_line_of_metrics_is_named(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("broken\n")
    with pytest.raises(UserError, match="line 5 is not a step's metrics"):
        write_page(run)


@needs_chromium
def test_a_browser_draws_every_part_in_words_for_people(run: Path, browser: Chromium) -> None:
    browser.open(f"file://{write_page(run, STATES)}")
    browser.until("document.querySelectorAll('#charts svg.plot').length >= 2")
    text = browser.until("document.querySelectorAll('.sample').length === 3 && document.body.innerText")
    for expected in (
        "40.0% → 65.0%",
        "2 prompts trained on",
        "sample left out: reward failed",
        "question 2",
        "server 127.0.0.1:3000",
        "after weights",
        "A step's seconds",
        "500 ms",  # median of the updates
    ):
        assert expected in text, expected
    assert "rollout/reward" not in text
    assert browser.complaints == []


@needs_chromium
def test_hostile_text_stays_text(run: Path, browser: Chromium) -> None:
    browser.open(f"file://{write_page(run, STATES)}")
    browser.until("document.querySelectorAll('.sample').length === 3")
    browser.run("document.querySelector('.sample').open = true")
    shown = browser.until("document.querySelector('.sample .turn.sampled pre').textContent")
    assert shown.startswith("</script><script>document.title='owned'</script><img src=x")
    assert shown.endswith("⟨U+202E⟩evil⟨U+2066⟩")
    assert browser.run("document.title") == "demo: megarl run"
    assert browser.run("document.querySelectorAll('img, b b').length") == 0
    assert browser.run("document.querySelectorAll('script').length") == 2
    inject = "s => { s.textContent = \"document.title='owned'\"; document.body.append(s) }"
    browser.run(f"({inject})(document.createElement('script'))")  # even a script in the page does not run
    assert browser.run("document.title") == "demo: megarl run"
    assert "Content Security Policy" in "".join(browser.complaints)


@needs_chromium
def test_a_page_tells_when_it_was_written_and_how_much_it_holds(
    run: Path, browser: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.observe.page.MAX_SAMPLES", 2)
    before = time.strftime("written %Y-%m-%d %H:%M")
    browser.open(f"file://{write_page(run, [('run', 'step 4, 32s ago', '')])}")
    after = time.strftime("written %Y-%m-%d %H:%M")
    shown = browser.until("document.getElementById('count').textContent")
    assert shown == "2 shown of 2 that fit, 3 in all, 2 on this page"
    text = browser.run("document.body.innerText")
    assert before in text or after in text


@needs_chromium
@pytest.mark.parametrize(("ranks", "words"), [(1, "1 trainer rank, 2 ranks of 1 server"), (2, "2 trainer ranks, 2")])
def test_the_sync_plan_counts_its_ranks(run: Path, browser: Chromium, ranks: int, words: str) -> None:
    plan = {
        "version": 1,
        "hash": "ab" * 32,
        "servers": ["127.0.0.1:3000"],
        "server_of_rank": [0, 0],
        "transports": "gloo",
        "tensors": 3,
        "messages": 2 * ranks,
        "buckets": 1,
        "bucket_bytes": 1000,
        "pairs": [[sender, receiver, 500] for sender in range(ranks) for receiver in range(2)],
        "all_pairs": 2 * ranks,
        "sent": [1000] * ranks,
        "received": [500 * ranks] * 2,
        "held": [500 * ranks] * 2,
    }
    (run / "sync_plan.json").write_text(json.dumps(plan))
    browser.open(f"file://{write_page(run)}")
    assert words in browser.until("document.body.innerText.includes('trainer rank') && document.body.innerText")


@needs_chromium
def test_charts_have_several_steps_on_a_phone_and_no_more_than_100_percent(run: Path, browser: Chromium) -> None:
    rows = [{"step": s, "eval/accuracy": 1.0, "train/clip_fraction": s / 80} for s in range(1, 81)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    browser.open(f"file://{write_page(run)}", width=400)
    labels = "[...document.querySelectorAll('#charts svg.plot')].map(p => [...p.querySelectorAll('{}')])"
    texts = f"(t => t.length === 2 && t)({labels.format('text')}.map(p => p.map(t => t.textContent)))"
    for shown in browser.until(texts):
        assert [label for label in shown if label.isdecimal()] == ["20", "40", "60", "80"]
        percents = [float(label.removesuffix(" %")) for label in shown if label.endswith("%")]
        assert len(percents) >= 3
        assert max(percents) == 100
    apart = "p.map(t => t.getBoundingClientRect()).sort((a, b) => a.left - b.left)"
    steps = labels.format("text[text-anchor=middle]")
    gaps = browser.run(f"{steps}.map(p => {apart}).flatMap(b => b.slice(1).map((c, i) => c.left - b[i].right))")
    assert min(gaps) > 10


@needs_chromium
def test_samples_are_filtered_by_reward_and_text(run: Path, browser: Chromium) -> None:
    browser.open(f"file://{write_page(run)}")
    count = "document.getElementById('count').textContent"
    browser.until(f"{count}.startsWith('3 shown of 3')")
    fill = "(i => {{ i.value = '{1}'; i.dispatchEvent(new Event('input')) }})(document.getElementById('{0}'))"
    browser.run(fill.format("least", "1"))
    browser.until(f"{count}.startsWith('2 shown of 2')")
    browser.run(fill.format("find", "QUESTION 2"))
    browser.until(f"{count}.startsWith('1 shown of 2')")
    assert "question 2" in browser.run("document.getElementById('samples').innerText")


@needs_chromium
def test_a_conversation_names_its_speakers_and_tool_calls(run: Path, browser: Chromium) -> None:
    browser.open(f"file://{write_page(run)}")
    browser.until("document.querySelectorAll('.sample').length === 3")
    choose = "s => { s.value = 'training'; s.dispatchEvent(new Event('change')) }"
    browser.run(f"({choose})(document.getElementById('source'))")
    browser.until("document.querySelectorAll('.sample').length === 4")
    browser.run("document.querySelector('.sample').open = true")
    who = browser.until("[...document.querySelectorAll('.sample[open] .turn > .who')].map(n => n.textContent)")
    assert who == ["system", "user", "model", "tool", "model"]
    calls = browser.run("[...document.querySelectorAll('.sample[open] .call')].map(n => n.innerText)")
    assert "calls calculator" in calls[0]
    assert "expression: \n2+2" in calls[0] or "expression:\n2+2" in calls[0]
    assert "result of the tool" in calls[1]
    assert browser.run("document.querySelector('.sample[open] details summary').textContent").startswith("thoughts")
    assert "<|im_end|>" not in browser.run("document.querySelector('.sample[open]').innerText")


@needs_chromium
def test_knobs_of_the_page_smooth_the_curves_and_equal_their_scales(run: Path, browser: Chromium) -> None:
    rows = [{"step": s, "eval/accuracy": 0.5 + s % 2 / 10, "train/clip_fraction": 0.01} for s in range(1, 21)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    browser.open(f"file://{write_page(run)}")
    ticks = (
        "[...document.querySelectorAll('#charts svg.plot')].map(p => "
        "[...p.querySelectorAll('text[text-anchor=end]')].map(t => t.textContent))"
    )
    before = browser.until(f"(t => t.length === 2 && t)({ticks})")
    assert before[0] != before[1]
    assert all(label.endswith("%") for label in before[0][:-1])  # the last names the axis
    browser.run("[...document.querySelectorAll('label')].find(l => l.innerText.includes('equal scales')).click()")
    equal = browser.until(f"(t => t.length === 2 && t[0].join() === t[1].join() && t)({ticks})")
    assert equal[0][0] == "0 %"
    assert equal[0][-2] == "100 %"
    browser.run("(i => { i.value = 2; i.dispatchEvent(new Event('input')) })(document.getElementById('smooth'))")
    points = browser.until(
        "(p => p.length === 2 && p[1].getAttribute('points'))"
        "(document.querySelector('#charts svg.plot').querySelectorAll('polyline'))"
    )
    heights = {point.split(",")[1] for point in points.split(" ")[1:]}
    assert len(heights) == 1  # the mean of two neighbours is the same everywhere
    assert "mean of 2 points" in browser.run("document.body.innerText")


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_on_a_narrow_screen_the_page_fits_and_targets_can_be_touched(run: Path, browser: Chromium, dark: bool) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[-1] |= {
        f"time_s/{'long_stage_name' * 3}": 1.0,
        "train/logprob_diff_max": 1e-7,
        "train/logprob_diff_mean": 2e-8,
    }
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    browser.open(f"file://{write_page(run, STATES)}", width=400, dark=dark)
    browser.until("document.querySelectorAll('.sample').length === 3 && document.querySelectorAll('svg.plot').length")
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.run("document.documentElement.scrollWidth") <= 400  # tables scroll, not the page
    texts = "[...document.querySelectorAll('.sample .preview, .sample .turn pre')].filter(n => n.offsetParent)"
    widths = browser.run(f"{texts}.map(n => n.getBoundingClientRect().width)")
    assert len(widths) >= 9  # prompt and completion in the preview, and the turns
    assert min(widths) > 280  # a column of its own would leave a prompt 50 pixels
    small = browser.run(
        "[...document.querySelectorAll('button, select, input:not([type=checkbox]), nav a')]"
        ".filter(n => n.offsetParent).map(n => [n.outerHTML.slice(0, 60), n.getBoundingClientRect().height])"
        ".filter(([, h]) => h < 40)"
    )
    assert small == []
    clipped = browser.run(
        "[...document.querySelectorAll('.legend, .legend span, h3, pre, summary')].filter(n => n.offsetParent && "
        "n.getBoundingClientRect().right > 400).map(n => n.textContent.slice(0, 60))"
    )
    assert clipped == []
    overlap = browser.run(
        "[...document.querySelectorAll('.chart')].filter(c => c.querySelector('.legend').getBoundingClientRect()"
        ".bottom > c.querySelector('svg.plot').getBoundingClientRect().top + 1).length"
    )
    assert overlap == 0  # a legend hides no curve
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark
