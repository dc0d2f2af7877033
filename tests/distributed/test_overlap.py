"""Reduction of gradients and gathering of parameters overlap with compute, and change no number."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from megarl.launcher.local import run_ranks
from tests import rows
from tests.distributed.overlap_worker import STEPS
from tests.distributed.test_layouts import make_batch

pytestmark = rows.marks()
SP = {"tp_size": 2, "sequence_parallel": True}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {"family": "qwen3", "tied": False},
    "tied": {"family": "qwen2", "tied": True},
    "moe": {"family": "qwen3_moe", "tied": False},
    "delta net": {"family": "qwen3_next", "tied": False},
}
CHUNKED = {"kept_logits_mb": 0}  # the head adds its gradient to the main gradient itself
EMPTY = {**CHUNKED, "max_tokens_per_mb": 36}  # rank 0 has a sequence of 33 tokens, rank 1 has 20 and 17
LORA = {**CHUNKED, "lora": {"rank": 4}}
VALUES: dict[str, Any] = {"model": "untied", "reads": "values"}
ONCE: dict[str, Any] = {"fields": CHUNKED, "reads": "token loss"}  # the head adds it in the forward pass
CASES: dict[int, dict[str, dict[str, Any]]] = {  # by ranks
    1: {"one rank": {"model": "untied", "layout": {}, "fields": CHUNKED}},
    2: rows.only("dp2 chunked,dp2 kept,dp2 tied,dp2 empty values,cp2,tp2 sp,tp2 sp once,pp2 vpp2,moe ep2 lora,"
                 "dp2 delta net", {
        "dp2 chunked": {"model": "untied", "layout": {"dp_size": 2}, "fields": CHUNKED},
        "dp2 kept": {"model": "untied", "layout": {"dp_size": 2}},
        "dp2 tied": {"model": "tied", "layout": {"dp_size": 2}, "fields": CHUNKED},
        "dp2 logits": {"model": "untied", "layout": {"dp_size": 2}, "reads": "logits"},
        "dp2 values": {**VALUES, "layout": {"dp_size": 2}},
        "dp2 empty": {"model": "untied", "layout": {"dp_size": 2}, "fields": EMPTY, "sequences": [1, 3, 4]},
        "dp2 empty values": {**VALUES, "layout": {"dp_size": 2}, "fields": EMPTY, "sequences": [1, 3, 4]},
        "dp2 empty tied": {"model": "tied", "layout": {"dp_size": 2}, "fields": EMPTY, "sequences": [1, 3, 4]},
        "dp2 recompute": {"model": "untied", "layout": {"dp_size": 2}, "fields": {**CHUNKED, "recompute": "full"}},
        "cp2": {"model": "untied", "layout": {"cp_size": 2}, "fields": CHUNKED},
        "tp2 sp": {"model": "tied", "layout": SP, "fields": CHUNKED},
        "dp2 chunked once": {"model": "untied", "layout": {"dp_size": 2}, **ONCE},
        "dp2 tied once": {"model": "tied", "layout": {"dp_size": 2}, **ONCE},
        "dp2 empty once": {
            "model": "untied",
            "layout": {"dp_size": 2},
            **ONCE,
            "fields": EMPTY,
            "sequences": [1, 3, 4],
        },
        "cp2 once": {"model": "untied", "layout": {"cp_size": 2}, **ONCE},
        "tp2 sp once": {"model": "tied", "layout": SP, **ONCE},
        "pp2 once": {"model": "untied", "layout": {"pp_size": 2}, **ONCE},
        "pp2 vpp2 once": {
            "model": "tied",
            "layout": {"pp_size": 2, "vpp_size": 2},
            **ONCE,
            "sequences": [0, 1, 2, 3, 4, 5],
        },
        "pp2": {"model": "untied", "layout": {"pp_size": 2}, "fields": CHUNKED},
        "pp2 tied": {"model": "tied", "layout": {"pp_size": 2}, "fields": CHUNKED},
        "pp2 values": {**VALUES, "model": "tied", "layout": {"pp_size": 2}},
        "pp2 vpp2": {
            "model": "tied",
            "layout": {"pp_size": 2, "vpp_size": 2},
            "fields": CHUNKED,
            "sequences": [0, 1, 2, 3, 4, 5],
        },
        "moe ep2": {"model": "moe", "layout": {"dp_size": 2, "ep_size": 2}, "fields": CHUNKED},
        "dp2 lora": {"model": "untied", "layout": {"dp_size": 2}, "fields": LORA},
        "dp2 lora values": {**VALUES, "layout": {"dp_size": 2}, "fields": LORA},
        "moe ep2 lora": {"model": "moe", "layout": {"dp_size": 2, "ep_size": 2}, "fields": LORA},
        "dp2 delta net": {"model": "delta net", "layout": {"dp_size": 2}, "fields": CHUNKED},
    }),
    4: rows.only("", {
        "pp2 vpp2 dp2": {"model": "tied", "layout": {"pp_size": 2, "vpp_size": 2, "dp_size": 2}, "fields": CHUNKED},
        "moe ep2 dp4": {"model": "moe", "layout": {"dp_size": 4, "ep_size": 2, "etp_size": 2}, "fields": CHUNKED},
    }),
}  # fmt: skip
NAMES = [(name, rank) for ranks, cases in CASES.items() for name in cases for rank in range(ranks)]


@pytest.fixture(scope="module")
def work(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs all cases, and returns the folder with their results."""
    folder = tmp_path_factory.mktemp("overlap")
    for name, fields in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "model").symlink_to(checkpoints(num_hidden_layers=4, **fields))
        save_file(make_batch(343), folder / name / "batch.safetensors")
    for ranks, cases in CASES.items():
        if not cases:
            continue
        defaults = {"reads": "logprobs", "sequences": list(range(8))}
        full = {
            name: {**defaults, **case, "fields": {"max_tokens_per_mb": 60, **case.get("fields", {})}}
            for name, case in cases.items()
        }
        arguments = [str(folder), json.dumps(full)]
        assert run_ranks("tests.distributed.overlap_worker", arguments, ranks, folder) == 0, ranks
    return folder


def facts_of(work: Path, name: str, rank: int) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((work / f"{name}.rank{rank}.json").read_text())
    return facts


@pytest.mark.parametrize(("name", "rank"), NAMES)
def test_overlap_changes_no_number(name: str, rank: int, work: Path) -> None:
    facts = facts_of(work, name, rank)
    assert {key: value for key, value in facts["differences"].items() if not value <= 1e-5} == {}
    for plain, overlapped in zip(*facts["stats"], strict=True):
        assert overlapped == pytest.approx(plain, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("name", "rank"), NAMES)
def test_each_bucket_is_reduced_once_a_step_within_the_last_backward_pass(name: str, rank: int, work: Path) -> None:
    facts = facts_of(work, name, rank)
    for log in facts["logs"][1][1:]:  # Megatron counts in the first step what readies a bucket
        events = [tuple(event) for event in log["step"]]
        reduced = Counter(bucket for kind, bucket in events if kind == "start_grad_sync")
        assert reduced == dict.fromkeys(facts["buckets"], 1)
        begins, ends = ([i for i, e in enumerate(events) if e == ("backward", edge)] for edge in ("begin", "end"))
        for i, event in enumerate(events):
            if event[0] == "start_grad_sync":
                assert any(b < i < e for b, e in zip(begins, ends, strict=True)), event
                readied = [j for j, other in enumerate(events) if other == ("register_grad_ready", event[1])]
                assert max(readied) < i, f"{event[1]} was reduced before its last gradient"


@pytest.mark.parametrize("name", [name for name, _ in NAMES if name.endswith(" once")])
def test_logits_that_are_computed_once_give_the_bits_of_those_computed_twice(name: str, work: Path) -> None:
    for rank in range(2):
        once, twice = (facts_of(work, case, rank) for case in (name, name.removesuffix(" once")))
        assert once["stats"][0] == twice["stats"][0]
        assert once["digest"] == twice["digest"]


@pytest.mark.parametrize("name", ["one rank", "dp2 chunked", "dp2 kept", "dp2 tied", "cp2"])
def test_the_heads_bucket_is_reduced_before_the_first_layers_backward(name: str, work: Path) -> None:
    facts = facts_of(work, name, 0)
    events = [tuple(event) for event in facts["logs"][1][1]["step"]]
    assert len(facts["buckets"]) > 3
    first = next(i for i, (kind, _) in enumerate(events) if kind == "start_grad_sync")
    assert sum(kind == "register_grad_ready" for kind, _ in events[first:]) > 5


@pytest.mark.parametrize(("name", "rank"), NAMES)
def test_each_bucket_is_gathered_once_after_a_step_by_whatever_reads_it_first(name: str, rank: int, work: Path) -> None:
    facts = facts_of(work, name, rank)
    once = dict.fromkeys(facts["buckets"], 1)

    def gathered(part: list[list[str]]) -> Counter[str]:
        return Counter(bucket for kind, bucket in part if kind == "start_param_sync")

    logs = facts["logs"][1]
    assert gathered(logs[0]["step"]) == {}, "loaded parameters are complete"
    assert gathered(logs[0]["forward"]) == once, "log-probs read them"
    assert gathered(logs[0]["read"]) == {}
    assert gathered(logs[1]["step"]) == {}
    assert gathered(logs[2]["step"]) == once, "the forward pass of the step reads them"
    assert gathered(logs[2]["read"]) == once, "named_weights reads them"


def test_cases_named_empty_have_a_microbatch_without_weight_at_a_steps_end(work: Path) -> None:
    for name in CASES[2]:
        if "empty" in name:
            weights = [facts_of(work, name, rank)["weights"] for rank in range(2)]
            assert sorted(w == 0 for w in (weights[0] + weights[1])) == [False, False, False, True], name
            assert weights[0][1] == 0 or weights[1][1] == 0, name


def test_without_overlap_every_bucket_waits_for_the_end(work: Path) -> None:
    logs = facts_of(work, "dp2 chunked", 0)["logs"][0]
    assert len(logs) == STEPS
    for log in logs:
        kinds = [kind for kind, _ in log["step"]]
        assert "register_grad_ready" not in kinds
        assert kinds.index("start_grad_sync") > max(i for i, kind in enumerate(kinds) if kind == "backward")
