"""`preflight tune`: its layouts pass preflight, fit, and the shipped recipes are close to the best of them."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace

import pytest
from test_recipes import CLUSTER
from transformers import PretrainedConfig

from megarl import cli
from megarl.actor.config import RECOMPUTE
from megarl.config import Config
from megarl.families import read_config
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig
from megarl.preflight import report, tune
from megarl.preflight.findings import ROOMY, findings
from megarl.preflight.sizing import GIB, memory_of, peaks_of

BEHIND = 1.05  # times the best layout's step that a recipe may take


def model_of(name: str, *overrides: str) -> tuple[Config, PretrainedConfig]:
    config = cli.composed([f"+experiment={name}", *overrides])
    return config, read_config(str(report.folder_of(config.actor.path)))


LONG = (*CLUSTER[1::2], "dapo_32b", "grpo_70b", "grpo_moe_235b")  # every other one, and the longest searches


@functools.cache
def proposals(name: str) -> tuple[tune.Proposal, ...]:
    config, model = model_of(name)
    return tuple(tune.propose(config, model, report.folder_of(config.actor.path), tune.gpus_of(config)))


every_cluster = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in CLUSTER]
)


@every_cluster
def test_a_recipe_is_at_most_5_percent_behind_the_best_layout(name: str) -> None:
    config, model = model_of(name)
    best = proposals(name)[0].step.step_s
    assert tune.estimate(config, model).step_s <= BEHIND * best


@every_cluster
def test_the_override_line_of_a_proposal_makes_it_and_passes_preflight(name: str) -> None:
    config, _ = model_of(name)
    for proposal in proposals(name):
        pasted, model = model_of(name, *proposal.overrides(config).split())
        assert (pasted.parallel, pasted.server) == (proposal.config.parallel, proposal.config.server)
        assert tune.gpus_of(pasted) <= tune.gpus_of(config)
        assert not [f for f in findings(pasted, model, report.folder_of(pasted.actor.path)) if f.stops]
        peak = max(peaks_of(pasted, model))
        assert peak <= ROOMY * pasted.cluster.gpu_memory_gib * GIB
        assert proposal.memory == peak  # counted once for all layouts of a search, and here by preflight


TOKENS = (4096, 8192, 16384, 32768, 65536)


def test_the_search_finds_what_trying_every_layout_finds() -> None:
    """A small search space, each point estimated by preflight itself."""
    config, model = model_of("sft_8b")
    best = proposals("sft_8b")[0].step.step_s
    limit = ROOMY * config.cluster.gpu_memory_gib * GIB
    tried = []
    sizes = (1, 2, 4, 8)
    for tp, pp, cp, recompute, tokens in itertools.product(sizes, sizes, sizes, RECOMPUTE, TOKENS):
        if tp * pp * cp > 8:
            continue
        dp = 8 // tp // pp // cp
        parallel = ParallelConfig(tp_size=tp, pp_size=pp, cp_size=cp, dp_size=dp, sequence_parallel=tp > 1)
        actor = replace(config.actor, recompute=recompute, max_tokens_per_mb=tokens)
        made = replace(config, parallel=parallel, actor=actor)
        if max(stage.total for stage in memory_of(made, model)) <= limit:
            tried.append(tune.estimate(made, model).step_s)
    assert len(tried) > 20
    assert best == pytest.approx(min(tried), rel=0.01)


def variants(*overrides: str) -> list[tuple[int, bool]]:
    """Virtual stages, and userbuffers, that the search tries on four stages with tp 4."""
    config, model = model_of("grpo_70b", *overrides)
    base = ParallelConfig(tp_size=4, pp_size=4, dp_size=1, sequence_parallel=True)
    found = tune._variants(config, base, model.num_hidden_layers)
    return [(made.vpp_size, made.tp_comm_overlap) for made in found]


def test_the_search_tries_virtual_stages_and_userbuffers_where_they_are_legal() -> None:
    every = [(vpp, pieces) for vpp in (1, 2, 4, 5) for pieces in (False, True)]  # 20 layers a stage; up to 8
    assert variants() == every
    plain = [(vpp, False) for vpp in (1, 2, 4, 5)]
    for refused in ("actor.backend=torch", "actor.fp8=blockwise", "actor.shared_prefix=true", "deterministic=true"):
        assert variants(refused) == plain, refused
    config, model = model_of("grpo_70b")
    uneven = ParallelConfig(tp_size=4, pp_size=4, dp_size=1, first_stage_layers=16, last_stage_layers=16)
    counts = [made.vpp_size for made in tune._variants(config, uneven, model.num_hidden_layers)]
    assert counts == [1, 2, 4, 8]  # of 16 and 24 layers
    single = ParallelConfig(tp_size=4, dp_size=1)
    assert list(tune._variants(config, single, model.num_hidden_layers)) == [single]


@pytest.mark.long
def test_more_gpus_make_a_quicker_step_and_too_few_are_refused() -> None:
    config, model = model_of("grpo_7b")
    folder = report.folder_of(config.actor.path)
    eight, sixteen = (tune.propose(config, model, folder, count)[0].step.step_s for count in (8, 16))
    assert sixteen < 0.7 * eight
    with pytest.raises(UserError, match=r"gpus=2: no layout of Qwen/Qwen2.5-7B-Instruct .* give more GPUs"):
        tune.propose(config, model, folder, 2)


def test_the_command_prints_five_layouts_and_their_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.command(["tune", "+experiment=grpo_7b"]) == 0
    first = capsys.readouterr().out
    assert "Layouts on 8 GPUs" in first
    lines = re.findall(r"^(\d)  (parallel\.\S+=.*)$", first, re.MULTILINE)
    assert [number for number, _ in lines] == list("12345")
    assert all("server.n_servers=" in line and "actor.max_tokens_per_mb=" in line for _, line in lines[:1])
    assert report.command(["tune", "+experiment=grpo_7b", "gpus=8"]) == 0
    assert capsys.readouterr().out == first  # no chance is in it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpus=8"], "gpus=8 is the number of GPUs to tune for; add tune"),
        (["tune", "gpus=none"], "gpus=none must be a whole number from 1 to"),
        (["tune", "gpus=0"], "gpus=0 must be a whole number from 1 to"),
        (["tune", "show=batch"], "show=batch is a part of the report"),
        (["tune", "+experiment=gsm8k_grpo"], "tune needs a plan for GPUs: set cluster.gpus_per_node"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        report.command(arguments)
