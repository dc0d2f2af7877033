import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from megarl.knobs import UserError
from megarl.observe import metrics
from megarl.observe.logger import LoggerConfig, StatsLogger
from megarl.observe.report import draw_curve, summary_lines, write_summary

SUMMARY = {
    "accuracy_before": 0.4,
    "accuracy_after": 0.625,
    "accuracy_problems": 200,
    "steps": 100,
    "wall_s": 245.2,
    "time_to_first_step_s": 31.0,
    "tokens_per_s_rollout": 1500.0,
    "tokens_per_s_train": 5432.1,
    "max_rollout_train_logprob_diff": 2.5e-6,
    "weights_verified": 101,
}


def colours(path: Path) -> set[tuple[int, int, int]]:
    image = Image.open(path).convert("RGB")
    return {colour for _, colour in image.getcolors(image.width * image.height)}


def test_the_curve_is_drawn_from_the_metrics_of_a_run(tmp_path: Path):
    with StatsLogger(tmp_path, LoggerConfig(tensorboard=False)) as logger:
        logger.commit(0, {metrics.ACCURACY: 0.4})
        for step in range(1, 31):
            logger.commit(step, {metrics.REWARD: step / 40, metrics.LOSS: 1.0})
        logger.commit(31, {metrics.ACCURACY: 0.7, metrics.REWARD: math.nan})
    draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "demo")
    image = Image.open(tmp_path / "curve.png")
    assert image.size == (1560, 585)
    assert {(0x17, 0x69, 0xAA), (0x2E, 0x7D, 0x32)} <= colours(tmp_path / "curve.png")  # both lines are drawn


def test_without_a_reward_the_loss_is_drawn_in_a_single_panel(tmp_path: Path):
    draw_curve([{"step": step, metrics.LOSS: 1 / (step + 1)} for step in range(5)], tmp_path / "curve.png")
    assert Image.open(tmp_path / "curve.png").size == (780, 585)
    assert (0x2E, 0x7D, 0x32) in colours(tmp_path / "curve.png")


@pytest.mark.parametrize(
    "accuracies",
    [
        [0.38, 0.43, 0.5, 0.51, 0.57, 0.56, 0.62, 0.67, 0.66],  # the last falls after a steep rise
        [0.6, 0.62, 0.4, 0.3, 0.35],
        [0.5, 0.5],
        [0.9, 1.0, 0.95, 1.0],
        [random.Random(9).gauss(0.5, 0.1) for _ in range(12)],
    ],
)
def test_the_labels_of_the_accuracy_cross_no_line(accuracies: list[float], monkeypatch: pytest.MonkeyPatch):
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    draw_curve([{"step": 10 * n, metrics.ACCURACY: value} for n, value in enumerate(accuracies)], Path("curve.png"))
    figures[0].canvas.draw()
    (axes,) = figures[0].axes
    (line,) = axes.lines
    path, frame = line.get_path().transformed(line.get_transform()), axes.get_window_extent()
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert list(boxes) == [f"before {accuracies[0]:.1%}", f"after {accuracies[-1]:.1%}"]
    for box in boxes.values():
        assert not path.intersects_bbox(box, filled=False)
        assert frame.contains(box.x0, box.y0)
        assert frame.contains(box.x1, box.y1)


def test_metrics_without_a_curve_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="2 steps have none of eval/accuracy, rollout/reward or train/loss"):
        draw_curve([{"step": 0, "lr": 1.0}, {"step": 1, metrics.LOSS: math.nan}], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_the_summary_is_strict_json_in_the_run_folder(tmp_path: Path):
    path = write_summary(tmp_path, {**SUMMARY, "kl": math.nan, "layout": {"tp": 1, "times": [1.0, math.inf]}})
    assert path == tmp_path / "summary.json"
    assert json.loads(path.read_text()) == {**SUMMARY, "kl": None, "layout": {"tp": 1, "times": [1.0, None]}}


def test_the_closing_lines_have_the_accuracies_and_the_folder(tmp_path: Path):
    text = "\n".join(summary_lines(SUMMARY, tmp_path))
    assert "40.0% before, 62.5% after (+22.5 points) on 200 held-out problems" in text
    assert "100 in 4m05s, the first after 31s" in text
    assert "1,500 tokens/s in rollout, 5,432 tokens/s in training" in text
    assert "101 syncs" in text
    assert "at most 2.5e-06" in text
    assert str(tmp_path) in text
    assert "curve.png" not in text
    (tmp_path / "curve.png").write_bytes(b"")
    assert "curve.png" in summary_lines(SUMMARY, tmp_path)[-1]
    (tmp_path / "metrics.jsonl").write_text("")
    assert summary_lines({}, tmp_path)[-1] == f"read it   python -m megarl.report {tmp_path}"
    (tmp_path / "metrics.jsonl").unlink()
    assert summary_lines({}, tmp_path) == [f"folder    {tmp_path} (curve.png shows the curve)"]


def test_slow_modules_are_imported_only_when_used():
    modules = "metrics, timers, logger, progress, report, run_folder"
    report = "print([m for m in ('matplotlib', 'torch') if m in sys.modules])"
    code = f"import sys; from megarl.observe import {modules}; {report}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert result.stdout.strip() == "[]"
