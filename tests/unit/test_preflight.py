"""Preflight: what a run would be and what would stop it, from the configuration alone, in seconds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl import cli, preflight
from megarl.actor.families import read_config
from megarl.actor.memory import ITEM_BYTES, count_parameters, server_memory
from megarl.knobs import UserError
from megarl.trainer.findings import machines_of, memory_of

EXPERIMENTS = sorted(p.stem for p in (cli.CONFIGS / "experiment").glob("*.yaml"))
GRPO, BIG = "+experiment=gsm8k_grpo", "+experiment=grpo_70b"

# Parameters as the model's own pages give them, in billions.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 0.49,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54,
    "Qwen/Qwen2.5-7B-Instruct": 7.61,
    "Qwen/Qwen2.5-32B-Instruct": 32.5,
    "Qwen/Qwen2.5-72B-Instruct": 72.7,
    "Qwen/Qwen3-0.6B": 0.6,
    "Qwen/Qwen3-8B": 8.2,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-235B-A22B": 235,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "mistralai/Mistral-7B-v0.3": 7.25,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command and returns its exit code and what it printed."""

    def command(*arguments: str) -> tuple[int, str]:
        code = preflight.command(list(arguments))
        return code, capsys.readouterr().out

    return command


def stops(text: str) -> list[str]:
    return [line.removeprefix("STOPS  ") for line in text.splitlines() if line.startswith("STOPS")]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_passes(name: str, run: Callable[..., tuple[int, str]]) -> None:
    code, text = run(f"+experiment={name}", "show=memory")
    assert code == 0, text
    assert text.endswith("0 problems that would stop the run\n")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shape_of_a_public_model_has_the_published_number_of_parameters(name: str) -> None:
    assert count_parameters(read_config(str(preflight.folder_of(name)))) / 1e9 == pytest.approx(
        PUBLISHED[name], rel=0.01
    )


def test_every_model_of_the_assets_is_among_them() -> None:
    assert preflight.known_models() == sorted(PUBLISHED)


def test_the_whole_report_of_a_70b_run(run: Callable[..., tuple[int, str]]) -> None:
    code, text = run(BIG)
    assert code == 0
    assert "tp 8 x pp 4 x cp 2 x dp 1 = 64 ranks" in text
    assert "128 prompts x 16 completions = 2048 sequences / 4 = 512 an optimizer step" in text
    assert "512 + 4096 = 4608 tokens at most" in text
    assert "Layout: 12 nodes of 8" in text
    assert "tp7 cp1 pp3" in text
    assert text.count("server 3") == 8
    assert "64 trainer ranks, 4 servers of 8" in text
    assert "each server rank receives what it holds, once" in text


def test_trainers_and_servers_share_no_node_unless_all_fit_on_one() -> None:
    one = machines_of(cli.composed(["+experiment=grpo_7b"]))
    assert (one.nodes, one.first_server_gpu) == (1, 4)
    many = machines_of(cli.composed([BIG]))
    assert (many.nodes, many.first_server_gpu) == (12, 64)


def test_memory_falls_as_each_remedy_says() -> None:
    """The remedies that a run out of memory is told to try do lower the peak."""

    def peak(*overrides: str) -> int:
        config = cli.composed([BIG, *overrides])
        return max(stage.total for stage in memory_of(config, model))

    model = read_config(str(preflight.folder_of("meta-llama/Llama-3.3-70B-Instruct")))
    base = peak("actor.recompute=none")
    for remedy in (
        "actor.recompute=full", "actor.recompute=selective", "actor.offload_optimizer=true", "parallel.dp_size=2",
    ):  # fmt: skip
        overrides = [remedy] if "recompute" in remedy else ["actor.recompute=none", remedy]
        assert peak(*overrides) < base, remedy
    assert peak("actor.recompute=none", "actor.max_tokens_per_mb=8192") < base
    assert peak("actor.dtype=float32", "actor.recompute=none") > base


def test_weights_of_all_ranks_add_up_to_the_model() -> None:
    config = cli.composed(["+experiment=grpo_moe_235b"])
    model = read_config(str(preflight.folder_of(config.actor.path)))
    experts = model.num_hidden_layers * model.num_experts * 3 * model.hidden_size * model.moe_intermediate_size
    dense = count_parameters(model) - experts
    # on a stage's 16 ranks (tp 4, ep 8, etp 1) dense weights lie 4 times, experts twice; a few on every tp rank
    ranks = 16 * sum(stage.weights for stage in memory_of(config, model))
    assert ranks == pytest.approx(ITEM_BYTES["bfloat16"] * (4 * dense + 2 * experts), rel=0.005)
    whole = ITEM_BYTES["bfloat16"] * (dense + experts)
    assert server_memory(model, 8, "bfloat16", 0).weights * 8 == pytest.approx(whole, rel=0.002)


def test_it_needs_seconds_and_loads_no_megatron() -> None:
    code = (
        "import sys, runpy; sys.argv = ['preflight', '+experiment=grpo_moe_235b', 'show=layout']\n"
        "try: runpy.run_module('megarl.preflight', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "loaded = [name for name in ('megatron', 'sglang') if name in sys.modules]\nassert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=cli.CONFIGS.parent, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([BIG, "parallel.tp_size=16"], "heads|tensor parallel groups span nodes"),
        ([BIG, "parallel.tp_size=7"], "parallel.tp_size=7 does not divide the model's num_attention_heads=64"),
        ([BIG, "parallel.pp_size=3"], "pp_size=3"),
        ([BIG, "parallel.tp_size=0"], "parallel.tp_size=0 must be at least 1"),
        ([BIG, "parallel.tp_size=1", "parallel.pp_size=1", "parallel.sequence_parallel=false"],
         r"pipeline rank 0 needs [\d.]+ GiB a GPU, over 95% of cluster.gpu_memory_gib=80; lower actor.max"),
        ([BIG, "server.tp_size=16"], "server.tp_size=16 exceeds cluster.gpus_per_node=8: a server is on one node"),
        ([BIG, "server.tp_size=3"], "server.tp_size=3 does not divide the model's num_attention_heads=64"),
        ([BIG, "server.n_servers=0"], "server.n_servers=0 must be at least 1"),
        ([BIG, "server.tp_size=1"], r"a server rank needs [\d.]+ GiB, over 95% of .*; raise server.tp_size"),
        ([BIG, "actor.max_tokens_per_mb=4096"], "= 4608 tokens do not fit into actor.max_tokens_per_mb=4096"),
        ([BIG, "gconfig.max_new_tokens=200000", "actor.max_tokens_per_mb=300000"],
         "sequences of 200512 tokens exceed the model's max_position_embeddings=131072; shorten them"),
        ([BIG, "train_dataset.max_length=null"], "train_dataset.max_length is not set"),
        ([BIG, "train_dataset.batch_size=0"], "train_dataset.batch_size=0 must be at least 1"),
        ([BIG, "algorithm.n_minibatches=3"], "= 2048 sequences do not divide into algorithm.n_minibatches=3"),
        ([BIG, "parallel.dp_size=3"], "parallel.dp_size=3 does not divide"),
        ([BIG, "actor.temperature=0.5"], "actor.temperature=0.5 must equal gconfig.temperature=1.0"),
        ([BIG, "actor.path=org/unknown"], "actor.path=org/unknown is no folder here, and its shape is not known"),
        ([BIG, "actor.recompute=some"], "actor.recompute=some must be one of none, selective, full"),
        ([BIG, "actor.dtype=float8"], "actor.dtype=float8 must be one of float32, bfloat16"),
        ([BIG, "actor.max_skipped_steps=-1"], "actor.max_skipped_steps=-1 must be at least 0"),
        ([BIG, "actor.optimizer.lr_decay_style=step"], "lr_decay_style=step must be one of constant, linear"),
        ([BIG, "actor.optimizer.lr_decay_style=WSD"], "wsd_decay_steps=0 with lr_decay_style=WSD: WSD needs"),
        ([BIG, "actor.optimizer.wsd_decay_steps=5"], "wsd_decay_steps=5 with lr_decay_style=constant"),
        ([BIG, "actor.optimizer.lr_decay_style=WSD", "actor.optimizer.wsd_decay_steps=500"],
         r"warmup_steps=5 \+ wsd_decay_steps=500 exceed the run's 200 steps"),
        ([BIG, "actor.optimizer.lr_decay_style=WSD", "actor.optimizer.wsd_decay_steps=5",
          "actor.optimizer.lr_wsd_decay_style=step"], "lr_wsd_decay_style=step must be one of linear"),
        ([BIG, "actor.optimizer.warmup_steps=200"], "warmup_steps=200 must be below total_train_steps=200"),
        ([BIG, "parallel.timeout_s=100"], "parallel.timeout_s=100 must exceed rollout.batch_timeout_s=1800"),
        ([GRPO, "cluster.gpus_per_node=0", "actor.path=Qwen/Qwen2.5-72B-Instruct"],
         "ranks and servers need .* of this machine's .*, or plan for GPUs"),
    ],
)  # fmt: skip
def test_a_problem_is_listed_in_one_line_with_its_remedy(
    arguments: list[str], message: str, run: Callable[..., tuple[int, str]]
) -> None:
    code, text = run(*arguments, "show=memory")
    lines = [line for line in text.splitlines() if line.startswith(("STOPS", "note"))]
    assert any(re.search(message, line) for line in lines), text
    assert code == (1 if stops(text) else 0)
    assert code == 1 or "span nodes" in text


def test_all_problems_are_listed_not_the_first(run: Callable[..., tuple[int, str]]) -> None:
    code, text = run(BIG, "actor.recompute=some", "actor.temperature=0.5", "algorithm.n_minibatches=3", "show=memory")
    assert code == 1
    assert len(stops(text)) == 3
    assert "3 problems that would stop the run" in text


def test_a_note_does_not_stop_the_run(run: Callable[..., tuple[int, str]]) -> None:
    code, text = run("+experiment=grpo_7b", "cluster.gpus_per_node=3", "parallel.tp_size=2", "show=memory")
    assert "tensor parallel groups span nodes" in text
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show=everything"], "show=everything is not one of show=memory, show=layout, show=reshard"),
        (["check=all"], "check=all is not one of check=invariance"),
        ([BIG, "actor.pth=x"], "unknown config key actor.pth; did you mean actor.path?"),
        (["+experiment=gsm8k_sft", "show=reshard"], "method=sft has no servers that weights are sent to"),
        ([BIG, "cluster.gpus_per_node=-1"], "cluster.gpus_per_node=-1 must be at least 0"),
        ([BIG, "cluster.gpu_memory_gib=0"], "cluster.gpu_memory_gib=0.0 must be above 0"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        preflight.command(arguments)


def test_a_local_folder_is_taken_as_it_is(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    shape = preflight.folder_of("Qwen/Qwen3-0.6B") / "config.json"
    (tmp_path / "config.json").write_text(shape.read_text())
    code, text = run(GRPO, f"actor.path={tmp_path}", "actor.max_tokens_per_mb=512")
    assert code == 0, text
    assert "596M parameters" in text
