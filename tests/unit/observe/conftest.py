"""A small run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

OWN = "document.title='owned'"
HOSTILE = f'</script><script>{OWN}</script><img src=x onerror="{OWN}">\u202eevil\u2066'


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "demo" / "2026-01-01"
    rows = [
        {
            "step": s,
            "time": 1000.0 + s,
            "rollout/reward": 0.1 * s,
            "train/loss": "nan" if s == 2 else 1.0,
            "time_s/update": 0.5,
            "time_s/rollout": s / 2,
        }
        for s in range(1, 5)
    ]
    write_lines(folder / "metrics.jsonl", rows)
    summary = {"experiment": "demo", "steps": 4, "wall_s": 75.0, "accuracy_before": 0.4, "accuracy_after": 0.65}
    (folder / "summary.json").write_text(json.dumps(summary | {"stopped_early": False}))
    (folder / "config.yaml").write_text("experiment_name: demo\n")
    episodes = [
        {"prompt_id": "0", "samples": 2, "rewards": [1, 0]},
        {"prompt_id": "1", "rejected": "timed out"},
        {"prompt_id": "2", "samples": 1, "dropped": {"reward failed": 3}},
    ]
    write_lines(folder / "episodes.jsonl", episodes)
    samples = [
        {
            "step": 4,
            "problem": n,
            "prompt": f"question {n}",
            "completion": HOSTILE if n == 0 else "four",
            "reward": float(n),
            "solved": n > 0,
            "versions": [3, 4],
        }
        for n in range(3)
    ]
    write_lines(folder / "evaluations" / "step-000004.jsonl", samples)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+2"}}</tool_call><|im_end|>'
    turns = [
        [False, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"],
        [True, call],
        [False, "\n<|im_start|>tool\n<tool_response>4</tool_response><|im_end|>\n<|im_start|>assistant\n"],
        [True, "<think>easy</think>It is 4.<|im_end|>"],
    ]
    trained = [
        {"step": s, "problem": str(s), "reward": 1.0, "versions": [s - 1], "tokens": 9, "turns": turns}
        for s in range(1, 5)
    ]
    write_lines(folder / "samples.jsonl", trained)
    spans = [["rollout", "", 1000.0, 1001.0], ["update", "", 1001.0, 1002.0], ["forward", "", 1001.2, 1001.5]]
    lines = [
        {"step": s, "spans": [[n, lane, a + 2 * s, b + 2 * s] for n, lane, a, b in spans], "loads": {}}
        for s in range(1, 5)
    ]
    write_lines(folder / "timeline" / "rank_1.jsonl", lines)
    paused = ["paused for version 1", "127.0.0.1:3000", 1003.0, 1003.5]
    for line in lines:
        line["spans"].append([paused[0], paused[1], paused[2] + line["step"], paused[3] + line["step"]])
        line["loads"] = {"127.0.0.1:3000": [[1000.0 + 2 * line["step"], 8], [1000.5 + 2 * line["step"], 0]]}
    write_lines(folder / "timeline" / "rank_0.jsonl", lines)
    return folder
