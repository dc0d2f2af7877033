"""Preflight predicts a run and lists its problems from the configuration alone, in seconds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from megarl import cli
from megarl.actor.sizes.memory import ITEM_BYTES
from megarl.actor.sizes.parameter_counts import count_parameters
from megarl.actor.sizes.server_memory import server_memory
from megarl.families import read_config
from megarl.knobs import UserError
from megarl.preflight import environment, report, shapes
from megarl.preflight.sizing import beside_actor, memory_of
from megarl.versions import GPUs

GRPO, BIG = "+experiment=gsm8k_grpo", "+experiment=grpo_70b"

# Parameters as the model's own pages give them, in billions.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 0.49,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54,
    "Qwen/Qwen2.5-7B-Instruct": 7.61,
    "Qwen/Qwen2.5-32B": 32.5,
    "Qwen/Qwen2.5-32B-Instruct": 32.5,
    "Qwen/Qwen2.5-72B-Instruct": 72.7,
    "Qwen/Qwen3-0.6B": 0.6,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-8B": 8.2,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-235B-A22B": 235,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79.7,  # without the MTP layer
    "Qwen/Qwen3.5-35B-A3B": 34.7,  # of the text part, without the MTP layer
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "mistralai/Mistral-7B-v0.3": 7.25,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
    "google/gemma-3-1b-it": 1.0,
    "lmsys/gpt-oss-20b-bf16": 20.91,
    "lmsys/gpt-oss-120b-bf16": 116.83,
    "openai/gpt-oss-20b": 20.91,
    "openai/gpt-oss-120b": 116.83,
    "deepseek-ai/DeepSeek-V3": 671,
    "moonshotai/Moonlight-16B-A3B": 16,
    "moonshotai/Kimi-K2-Instruct": 1026,
    "zai-org/GLM-4.5-Air": 106,
    "zai-org/GLM-4.7-Flash": 30,
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs the command outside of any allocation. Returns its exit code and output."""
    for name in [name for name in os.environ if name == "COLUMNS" or name.startswith("SLURM_")]:
        monkeypatch.delenv(name)

    def command(*arguments: str) -> tuple[int, str]:
        code = report.command(list(arguments))
        return code, capsys.readouterr().out

    return command


def stops(text: str) -> list[str]:
    return [line.removeprefix("STOPS  ") for line in text.splitlines() if line.startswith("STOPS")]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shape_of_a_public_model_has_the_published_number_of_parameters(name: str) -> None:
    assert count_parameters(read_config(str(report.folder_of(name)))) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_every_model_of_the_assets_is_among_them() -> None:
    assert shapes.known_models() == sorted(PUBLISHED)


def test_the_whole_report_of_a_70b_run(run: Callable[..., tuple[int, str]]) -> None:
    code, text = run(BIG)
    assert code == 0
    assert "tp 4 x pp 4 x cp 2 x dp 2 = 64 ranks" in text
    assert "512 prompt + 4096 completion = 4608 tokens" in text
    assert "128 prompts x 16 completions = 2048 sequences" in text
    assert "2048 sequences / 4 minibatches = 512" in text
    assert "floor(9216 tokens / 4608) = 2" in text
    assert "ceil(256 / 2) = 128" in text
    assert "Layout: 12 nodes of 8" in text
    assert "tp3 cp1 dp1" in text
    assert text.count("server 3") == 8
    assert "64 trainer ranks, 4 servers of 8" in text
    assert "each server rank receives what it holds, once" in text
    assert "nccl to 4 servers: nccl between GPUs of their own" in text
    assert "a token of it │ 40 KiB" in text  # 2 x 80 layers x 1 of 8 KV heads x 128 x 2 bytes
    assert "x (2 kept + 1 being written) + 131.4 GiB exported" in text
    for stage in ("prefill", "decode", "log-probs", "update", "communication", "weights", "bottleneck"):
        assert re.search(rf"│ {stage} +│", text), stage
    assert "a roofline, not measured: 989 TFLOP/s x 0.35" in text
    assert re.search(r"Transformer Engine +│ (not found|\d)", text)


def test_memory_falls_as_each_remedy_says() -> None:
    """Each remedy in the message about memory lowers the peak."""

    def peak(*overrides: str) -> int:
        config = cli.composed([BIG, *overrides])
        return max(stage.total for stage in memory_of(config, model))

    model = read_config(str(report.folder_of("meta-llama/Llama-3.3-70B-Instruct")))
    base = peak("actor.recompute=none")
    for remedy in (
        "actor.recompute=full", "actor.recompute=selective", "actor.offload_optimizer=true", "parallel.dp_size=4",
    ):  # fmt: skip
        overrides = [remedy] if "recompute" in remedy else ["actor.recompute=none", remedy]
        assert peak(*overrides) < base, remedy
    assert peak("actor.recompute=none", "actor.max_tokens_per_mb=8192") < base
    assert peak("actor.dtype=float32", "actor.recompute=none") > base


def test_weights_of_all_ranks_add_up_to_the_model() -> None:
    config = cli.composed(["+experiment=grpo_moe_235b"])
    model = read_config(str(report.folder_of(config.actor.path)))
    experts = model.num_hidden_layers * model.num_experts * 3 * model.hidden_size * model.moe_intermediate_size
    dense = count_parameters(model) - experts
    # on a stage's 16 ranks (tp 4, ep 8, etp 1) dense weights lie 4 times, experts twice; a few on every tp rank
    ranks = 16 * sum(stage.weights for stage in memory_of(config, model))
    assert ranks == pytest.approx(ITEM_BYTES["bfloat16"] * (4 * dense + 2 * experts), rel=0.005)
    whole = ITEM_BYTES["bfloat16"] * (dense + experts)
    assert server_memory(model, 8, "bfloat16", 0).weights * 8 == pytest.approx(whole, rel=0.002)


def test_it_needs_seconds_and_loads_no_megatron() -> None:
    code = (
        "import sys, runpy; sys.argv = ['preflight', '+experiment=grpo_70b', 'show=layout']\n"
        "try: runpy.run_module('megarl.preflight', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "loaded = [name for name in ('megatron', 'sglang') if name in sys.modules]\nassert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900, cwd=cli.CONFIGS.parent, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([BIG, "parallel.tp_size=16"], "heads|tensor parallel groups span nodes"),
        ([BIG, "parallel.tp_size=7"], "parallel.tp_size=7 does not divide the model's num_attention_heads=64"),
        ([BIG, "parallel.pp_size=3"], "pp_size=3"),
        ([BIG, "parallel.tp_size=1", "parallel.pp_size=1", "parallel.sequence_parallel=false"],
         r"pipeline rank 0 with its nccl staging needs [\d.]+ GiB a GPU, over 95% of cluster.gpu_memory_gib=80; lo"),
        ([BIG, "server.tp_size=16"], "server.tp_size=16 exceeds cluster.gpus_per_node=8: a server is on one node"),
        ([BIG, "server.tp_size=3"], "server.tp_size=3 does not divide the model's num_attention_heads=64"),
        ([BIG, "server.tp_size=1"],
         r"a server rank with its nccl staging needs [\d.]+ GiB, over 95% of .*; raise server.tp_size"),
        ([BIG, "actor.max_tokens_per_mb=4096"], "= 4608 tokens do not fit into actor.max_tokens_per_mb=4096"),
        ([BIG, "gconfig.max_new_tokens=200000", "actor.max_tokens_per_mb=300000"],
         r"= 200512 exceeds the model's max_position_embeddings=131072; shorten one of them"),
        ([BIG, "train_dataset.max_length=null"], "train_dataset.max_length is not set"),
        ([BIG, "valid_dataset.max_length=null"], "valid_dataset.max_length is not set"),
        ([BIG, "algorithm.n_minibatches=3"], "= 2048 sequences do not divide into algorithm.n_minibatches=3"),
        ([BIG, "parallel.dp_size=3"], "parallel.dp_size=3 does not divide"),
        ([BIG, "actor.temperature=0.5"], "actor.temperature=0.5 must equal gconfig.temperature=1.0"),
        ([BIG, "actor.path=org/unknown"], "actor.path=org/unknown is no folder here, and its shape is not known"),
        ([BIG, "actor.optimizer.lr_decay_style=WSD"], "wsd_decay_steps=0 with lr_decay_style=WSD: WSD needs"),
        ([BIG, "actor.optimizer.wsd_decay_steps=5"], "wsd_decay_steps=5 with lr_decay_style=constant"),
        ([BIG, "actor.optimizer.lr_decay_style=WSD", "actor.optimizer.wsd_decay_steps=500"],
         r"warmup_steps=10 \+ wsd_decay_steps=500 exceed the run's 200 steps"),
        ([BIG, "actor.optimizer.warmup_steps=200"], "warmup_steps=200 must be below total_train_steps=200"),
        ([BIG, "parallel.timeout_s=100"], "parallel.timeout_s=100 must exceed rollout.batch_timeout_s=1800"),
        ([BIG, "server.quantization=int4", "server.tp_size=2"],
         r"int4 copies a server rank's layers during a sync, 16.\d GiB, and weights and cache leave 10.\d GiB of its "
         r"GPU; set \+sglang.mem_fraction_static=0.7\d or lower, or raise server.tp_size"),
        ([GRPO, "+sglang.ep_size=two"], "sglang.ep_size=two must be at least 1"),
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
    code, text = run(BIG, "parallel.timeout_s=100", "actor.temperature=0.5", "algorithm.n_minibatches=3", "show=memory")
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
        (["show=everything"], "show=everything is not one of show=batch, show=layout, show=memory, show=reshard"),
        (["check=all"], "check=all is not one of check=invariance"),
        (["keep=here"], "keep=here keeps the figures of check=invariance"),
        ([BIG, "actor.pth=x"], "unknown config key actor.pth; did you mean actor.path?"),
        (["+experiment=gsm8k_sft", "show=reshard"], "method=sft has no servers that weights are sent to"),
        ([BIG, "cluster.gpus_per_node=-1"], "cluster.gpus_per_node=-1 must be at least 0"),
        ([BIG, "cluster.gpu_memory_gib=0"], "cluster.gpu_memory_gib=0.0 must be at least 0.001"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        report.command(arguments)


def test_a_local_folder_is_taken_as_it_is(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    shape = report.folder_of("Qwen/Qwen3-0.6B") / "config.json"
    (tmp_path / "config.json").write_text(shape.read_text())
    arguments = (GRPO, f"actor.path={tmp_path}", "actor.max_tokens_per_mb=512")
    code, text = run(*arguments)
    assert "596M parameters" in text
    assert "holds no tokenizer; save the model's own" in text
    assert "holds no weights (*.safetensors); fetch them" in text
    assert (code, len(stops(text))) == (1, 2)
    (tmp_path / "tokenizer.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    assert "lacks 1 of its 2 weight files, the first is model-2.safetensors" in run(*arguments)[1]
    (tmp_path / "model-2.safetensors").touch()
    assert "model-2.safetensors (0 bytes) is cut off" in run(*arguments)[1]
    save_file({"b": torch.zeros(2).to(torch.float8_e4m3fn)}, tmp_path / "model-2.safetensors")
    assert "b is in 8 bits, and config.json has no quantization_config" in run(*arguments)[1]
    save_file({"b": torch.zeros(2)}, tmp_path / "model-2.safetensors")
    code, text = run(*arguments)
    assert code == 0, text


def test_the_sequences_of_a_run_must_fit_the_servers_cache(run: Callable[..., tuple[int, str]]) -> None:
    code, text = run(BIG, "server.max_total_tokens=4000", "show=memory")
    assert code == 1
    assert "the cache of a server holds 4000 tokens, a sequence has up to 4608; raise server.max_total_tokens" in text
    code, text = run(BIG, "+sglang.context_length=4096", "show=memory")
    assert code == 1
    assert "sglang.context_length=4096 is below sequences of 4608 tokens" in text
    code, text = run(BIG, "server.tp_size=2", "show=memory")  # 65.7 of 66.4 GiB
    assert code == 1
    assert "the cache of a server holds 4525 tokens" in text


def test_a_disk_that_is_too_small_stops_a_run_on_this_machine_alone(
    run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    code, text = run(GRPO, "show=batch")
    assert code == 1
    assert re.search(r"checkpoints need [\d.]+ MiB \(saver.keep=2 .*; set run_root to a larger disk", text)
    code, text = run(BIG, "show=batch")  # planned for GPUs on a machine that has none
    assert code == 0
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert run(BIG, "show=batch")[0] == 1


def test_a_run_root_that_cannot_be_written_stops_the_run(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, text = run(GRPO, f"run_root={tmp_path}/file/runs", "show=batch")
    assert code == 1
    assert f"{tmp_path}/file is not a folder that you may write to" in text


@pytest.mark.parametrize(
    ("environment", "message", "expected"),
    [
        (
            {"SLURM_JOB_NUM_NODES": "4"},
            "the run needs 12 nodes of cluster.gpus_per_node=8, and this allocation has 4",
            1,
        ),
        ({"SLURM_JOB_NUM_NODES": "13"}, "the run takes 12 of this allocation's 13 nodes", 0),
        ({"SLURM_JOB_NUM_NODES": "12", "SLURM_GPUS_ON_NODE": "4"}, "and Slurm gives 4 GPUs of a node", 1),
        (
            {"SLURM_JOB_NUM_NODES": "12", "SLURM_JOB_END_TIME": str(int(time.time()) + 900)},
            "checkpoints come every saver.every_steps=20",
            0,
        ),
        (
            {"SLURM_JOB_NUM_NODES": "12", "SLURM_JOB_END_TIME": str(int(time.time()) + 300)},
            "and its script is told to stop 600 s before (--signal=B:USR1): it stops after its first step or before it",
            0,
        ),
    ],
)
def test_an_allocation_that_does_not_fit_the_run_is_told(
    environment: dict[str, str],
    message: str,
    expected: int,
    run: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, text = run(BIG, "show=batch")
    assert message in text
    assert code == expected, text


@pytest.mark.parametrize(
    ("arguments", "message", "expected"),
    [
        ([GRPO, "train_dataset.path=/no/such/file.jsonl"], "'/no/such/file.jsonl' is no file or folder here", 1),
        ([GRPO, "train_dataset.type=my_rows.to_prompt"], "names to_prompt of my_rows.py, which is not in", 1),
        ([GRPO, "rewards.functions=[no_such]"], "rewards.functions: no_such is none of", 1),
        ([GRPO, "resume=no/such/run"], "resume=no/such/run is not a folder", 1),
        ([GRPO, "server.dtype=bfloat16"], "serves bfloat16 weights of actor.dtype=float32", 0),
        ([GRPO, "actor.dtype=bfloat16"], "actor.path holds float32 weights and actor.dtype=bfloat16", 0),
        (
            [BIG, "actor.recompute=full", "actor.max_tokens_per_mb=10240"],
            "actor.recompute=full leaves 35.8 GiB of a trainer GPU unused; actor.recompute=selective needs 62.0",
            0,
        ),
        (
            ["+experiment=grpo_moe_235b", "parallel.dp_size=4", "server.n_servers=7"],
            "the servers take 235 s of a step and the trainer 32 s, on GPUs of their own: move GPUs (server",
            0,
        ),
        (
            ["+experiment=grpo_moe_235b", "actor.moe_dispatcher=flex"],
            "actor.moe_dispatcher=flex needs the package deep_ep, which is not installed here; install it (pip install",
            0,
        ),
        ([BIG, "rollout.max_connections=64"], "keeps 16 completions under way on each, which could take", 0),
        ([BIG, "rollout.request_timeout_s=5"], "rollout.request_timeout_s=5 cuts off completions of 4096 tokens", 0),
        ([BIG, "rollout.batch_timeout_s=9"], "rollout.batch_timeout_s=9 is below the", 0),
        (
            [BIG, "server.tp_size=6", "server.n_servers=2"],
            "server.tp_size=6 does not divide cluster.gpus_per_node=8",
            1,
        ),
    ],
)
def test_problems_of_a_later_stage_are_told_now(
    arguments: list[str], message: str, expected: int, run: Callable[..., tuple[int, str]]
) -> None:
    code, text = run(*arguments, "show=batch")
    assert message in text
    assert code == expected, text


@pytest.mark.parametrize(("gpus", "stops"), [(GPUs(("H100",), (81559,), "580"), True), (GPUs(), False)])
def test_a_missing_deep_ep_stops_a_run_on_a_machine_with_gpus_alone(gpus: GPUs, stops: bool) -> None:
    config = cli.composed(["+experiment=grpo_moe_235b", "actor.moe_dispatcher=flex"])
    assert [finding.stops for finding in environment._of_dispatcher(config, gpus)] == [stops]
    assert environment._of_dispatcher(cli.composed(["+experiment=grpo_moe_235b"]), gpus) == []


def test_the_script_that_would_be_submitted_is_shown(run: Callable[..., tuple[int, str]]) -> None:
    _, text = run(BIG, "total_train_steps=20", "show=script")
    assert "#SBATCH --nodes=12" in text
    assert "train +experiment=grpo_70b total_train_steps=20" in text


def test_the_answer_fits_a_narrow_terminal(
    run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (100, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        _, text = run(BIG)
        drawn = [line for line in text.splitlines() if line.startswith(("│", "┃", "┏", "┌"))]
        assert max(map(len, drawn)) <= width
        assert not any("…" in line for line in drawn)  # nothing is cut off


def test_models_beside_the_actor_are_counted(run: Callable[..., tuple[int, str]]) -> None:
    assert "reference" in run("+experiment=grpo_7b", "show=memory")[1]
    config = cli.composed(["+experiment=gsm8k_ppo"])
    staging, model = {"gloo staging": 2 * 64 * 2**20}, read_config(config.actor.path)
    (stage,) = memory_of(config, model)
    critic = stage.weights + stage.gradients + stage.optimizer
    assert beside_actor(config, model, [stage]) == [{"critic": critic, **staging}]
    adapted = cli.composed(["+experiment=gsm8k_ppo", "actor.lora.rank=8"])  # the critic is on the actor's base
    (stage,) = memory_of(adapted, model)
    critic = 2 * stage.gradients + stage.optimizer  # of 4 bytes an element
    assert beside_actor(adapted, model, [stage]) == [{"critic": critic, **staging}]
    assert beside_actor(cli.composed([GRPO]), model, [stage]) == [staging]
    assert beside_actor(cli.composed(["+experiment=gsm8k_sft"]), model, [stage]) == [{}]


SERVED = ["+experiment=opd_8b", "teacher.source=server", "algorithm.divergence=top_k", "server.tp_size=1"]


def test_a_teacher_that_the_run_starts_is_planned_with_its_gpus(run: Callable[..., tuple[int, str]]) -> None:
    code, text = run(*SERVED, "teacher.tp_size=2")
    assert code == 0
    assert re.search(r"teacher +. Qwen/Qwen3-32B: 1 server of tp 2 ", text)
    assert re.search(r"rank 3 . server 0 . teacher 0 . teacher 0 . +- ", text)
    assert "1 node of 8" in text


def test_a_teacher_too_large_for_its_gpus_stops_the_run(run: Callable[..., tuple[int, str]]) -> None:
    code, text = run(*SERVED, "cluster.gpu_memory_gib=60", "actor.recompute=full")
    assert code == 1
    assert "a rank of a teacher server needs 61" in text
    assert "raise teacher.tp_size" in text


def test_a_sync_of_two_adapters_moves_twice_the_bytes_of_one(run: Callable[..., tuple[int, str]]) -> None:
    options = [GRPO, "actor.lora.rank=4", "actor.lora.sync=adapters", "show=reshard"]
    for names, figures in (([], "28, 38.9 kB"), (["+adapters.math=[]", "+adapters.law=[]"], "56, 77.8 kB")):
        code, text = run(*options, *names)
        assert code == 0
        assert re.search(rf"tensors +. {figures}", text)
        assert re.search(rf"to move +. {figures.split(', ')[1]}", text)


def test_a_layout_that_is_even_and_full_gets_no_remark(run: Callable[..., tuple[int, str]]) -> None:
    text = run(BIG, "show=batch")[1]
    assert "GPU unused" not in text
    assert "on GPUs of their own" not in text


def test_the_smaller_recipe_of_the_operators_page_takes_what_the_page_says(run: Callable[..., tuple[int, str]]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    planned = re.search(r"^python -m megarl.preflight (.*)$", page, re.MULTILINE)
    said = re.search(r"The plan has (\d+) nodes and a peak of (\d+) GiB a GPU", page)
    assert planned
    assert said
    code, text = run(*planned[1].split())
    assert code == 0
    assert f"sbatch --nodes={said[1]} " in page
    assert f"#SBATCH --nodes={said[1]}\n" in re.sub(" +\n", "\n", text)
    peaks = re.search(r"^│ peak (.*)$", text, re.MULTILINE)
    assert peaks
    assert max(round(float(peak)) for peak in re.findall(r"([\d.]+) GiB", peaks[1])) == int(said[2])
