"""Rules between knobs, and between knobs and the model: one place, one line each, all of them listed."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from megarl import checks, cli, evaluate, served_checks
from megarl.config import Config, server_ep_size
from megarl.families import read_config
from megarl.knobs import UserError, run_all
from megarl.preflight.shapes import folder_of

RL, SFT, DPO = "+experiment=gsm8k_grpo", "+experiment=gsm8k_sft", "+experiment=dpo"
LLAMA_70B = "+experiment=grpo_70b"
FP8_70B = (LLAMA_70B, "server.quantization=fp8")
GPU_SERVER = ("server.device=cuda", "server.dtype=bfloat16")
INT4_70B = (LLAMA_70B, "server.quantization=int4")
ADAPTERS = (RL, "actor.lora.rank=4", "actor.lora.sync=adapters")
TINY = cli.ASSETS / "tiny"


def config_of(*overrides: str) -> Config:
    return cli.composed(list(overrides))


def of_config(config: Config) -> list[str]:
    return checks.failures(checks.config_checks(config))


def of_model(config: Config) -> list[str]:
    model = read_config(str(TINY))
    return checks.failures([*checks.model_checks(config, model), *checks.length_checks(config, model)])


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("actor.dtype=foo", "actor.dtype=foo must be one of"),
        ("server.dtype=foo", "server.dtype=foo must be one of"),
        ("seed=-3", "seed=-3 must be at least 0"),
        ("server.random_seed=-3", "server.random_seed=-3 must be at least 0"),
        ("algorithm=dapo algorithm.overlong_budget=-1", "algorithm.overlong_budget=-1 must be"),
        ("algorithm=dapo gconfig.max_new_tokens=-1", "gconfig.max_new_tokens=-1 must be"),
    ],
)
def test_an_error_names_the_knob_that_was_set_not_its_copies(override: str, rule: str) -> None:
    with pytest.raises(UserError, match=rf"^{re.escape(rule)}"):
        config_of(RL, *override.split())


@pytest.mark.parametrize("path", sorted((cli.CONFIGS / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_passes(path: Path) -> None:
    assert of_config(config_of(f"+experiment={path.stem}")) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([RL, "actor.backend=cpu", "cluster.gpus_per_node=8"], "actor.backend=cpu is for machines without a GPU"),
        ([RL, "valid_dataset.max_length=99999"], "valid_dataset.max_length=99999 + gconfig.max_new_tokens="),
        ([SFT, "parallel.vpp_size=2"], "parallel.vpp_size=2 needs parallel.pp_size above 1"),
        ([SFT, "actor.optimizer.warmup_steps=500"], "warmup_steps=500 must be below total_train_steps="),
        (
            [RL, "critic_optimizer.warmup_steps=500"],
            "critic_optimizer.warmup_steps=500 must be below total_train_steps=",
        ),
        (
            [RL, "critic_optimizer.lr_decay_style=WSD"],
            "critic_optimizer.wsd_decay_steps=0 with lr_decay_style=WSD: WSD needs at least 1",
        ),
        (
            [
                RL,
                "critic_optimizer.lr_decay_style=WSD",
                "critic_optimizer.wsd_decay_steps=101",
                "total_train_steps=100",
            ],
            "critic_optimizer.warmup_steps=0 + wsd_decay_steps=101 exceed the run's 100 steps",
        ),
        ([SFT, "deterministic=true"], "deterministic=true is about rollouts, which method=sft has none of"),
        (
            [RL, "deterministic=true", "server.dtype=bfloat16"],
            "server.dtype=bfloat16 must be float32 with deterministic",
        ),
        (
            [RL, "server.device=cuda", "+sglang.attention_backend=fa3"],
            "sglang.attention_backend=fa3 takes 16-bit tensors, and server.dtype=float32; use one of torch_native",
        ),
        (
            [RL, "cluster.gpus_per_node=8", "+sglang.prefill_attention_backend=flashinfer"],
            "sglang.prefill_attention_backend=flashinfer takes 16-bit tensors",
        ),
        (
            [RL, "server.device=cuda", "+sglang.moe_runner_backend=flashinfer_trtllm"],
            "sglang.moe_runner_backend=flashinfer_trtllm may keep experts in another layout than the checkpoint's",
        ),
        (
            [RL, "reshard.transport=nccl", "server.device=cpu"],
            "reshard.transport=nccl moves weights between GPUs, and the servers run on the CPU (server.device=cpu",
        ),
        (
            ["+experiment=grpo_70b", "reshard.transport=shm"],
            "reshard.transport=shm stays on one machine, and 64 trainer ranks with 32 server ranks exceed "
            "cluster.gpus_per_node=8; use nccl or gloo",
        ),
        ([RL, "actor.lora.sync=adapters"], "actor.lora.sync=adapters without adapters (actor.lora.rank=0)"),
        (
            [RL, "actor.lora.rank=4", "+adapters.math=[]"],
            "adapters=['math'] needs method=rl and actor.lora.sync=adapters, and the run has method=rl and sync=merged",
        ),
        ([SFT, "actor.lora.rank=4", "actor.lora.sync=adapters", "+adapters.math=[]"], "and the run has method=sft and"),
        ([DPO, "method=rl"], "method=rl: algorithm=dpo learns from preferences"),
        ([DPO, "algorithm=grpo"], "method=preference: algorithm=grpo learns from rollouts"),
        ([RL, "actor.init=random"], "actor.init=random is for method=sft"),
        ([RL, "train_dataset.batch_size=3", "gconfig.n_samples=5"], "= 15 sequences do not divide into"),
        ([RL, "parallel.dp_size=3"], "parallel.dp_size=3 does not divide"),
        (
            [RL, "parallel=dp2", "parallel.timeout_s=60"],
            "parallel.timeout_s=60 must exceed rollout.batch_timeout_s=1800",
        ),
        ([DPO, "parallel.dp_size=3"], "rows are not divided by parallel.dp_size=3"),
        (
            [RL, "actor.max_tokens_per_mb=80"],
            "max_length=64 + gconfig.max_new_tokens=24 = 88 tokens do not fit into actor.max_tokens_per_mb=80",
        ),
        ([DPO, "actor.max_tokens_per_mb=100"], "max_length=64 x 2 of a pair = 128 tokens do not fit"),
        (
            [SFT, "actor.max_tokens_per_mb=60"],
            "max_length=64 tokens do not fit into actor.max_tokens_per_mb=60; raise it",
        ),
    ],
)
def test_knobs_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    failed = of_config(config_of(*overrides))
    assert any(message in text for text in failed), failed
    with pytest.raises(UserError):
        cli.load(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["server.device=cuda", "+sglang.attention_backend=triton"],
        ["server.device=cuda", "server.dtype=bfloat16", "+sglang.attention_backend=fa3"],
        ["server.device=cpu", "+sglang.attention_backend=fa3", "+sglang.moe_runner_backend=auto"],
        ["server.device=cuda", "+sglang.moe_runner_backend=deep_gemm"],
        ["cluster.gpus_per_node=2", "reshard.transport=cuda_ipc"],
        ["reshard.transport=shm"],
    ],
)
def test_backends_and_transports_that_serve_are_accepted(overrides: list[str]) -> None:
    assert of_config(config_of(RL, *overrides)) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*ADAPTERS, "reshard.path=full"],
            "reshard.path=full does not go with actor.lora.sync=adapters: whole tensors are of the base; set it to "
            "exact, or actor.lora.sync=merged",
        ),
        (
            [*ADAPTERS, "reshard.transport=disk", "reshard.folder=/tmp"],
            "reshard.transport=disk does not go with actor.lora",
        ),
        ([*ADAPTERS, "server.colocate=true"], "servers lose the base with their memory; set it to false, or"),
        (
            [*ADAPTERS, "+sglang.max_loras_per_batch=1"],
            "sglang.max_loras_per_batch=1 cannot be set with actor.lora.sync=adapters, which has the servers hold",
        ),
        (
            [*ADAPTERS, "+adapters={a/b:[]}"],
            "adapters has the name 'a/b', which also names a folder; take 1 to 64 letters, digits, - and _",
        ),
        ([*ADAPTERS, "+adapters.trained=[]"], "adapters has the name 'trained', the servers' own for the adapter of"),
        (
            [*ADAPTERS, *(f"+adapters.a{number}=[]" for number in range(65))],
            "adapters names 65, and at most 64 are trained at once: each has a slot in the memory of every server",
        ),
        ([SFT, "parallel.tp_size=3"], "parallel.tp_size=3 does not divide the model's num_attention_heads=4"),
        ([RL, "deterministic=true", "actor.dtype=bfloat16"], "actor.dtype=bfloat16 must be float32 with deterministic"),
        (
            [RL, "server.tp_size=3", "server.device=cuda"],
            "server.tp_size=3 does not divide the model's num_attention_heads=4",
        ),
        (
            [RL, "server.quantization=fp8"],
            "server ranks at server.tp_size=1 hold rows 0 to 64 of self_attn.q_proj.weight, no whole blocks; take a",
        ),
        (
            [*FP8_70B, "reshard.path=full"],
            "reshard.path=full does not go with server.quantization=fp8: whole tensors travel unquantised; set it to "
            "exact, or server.quantization=none",
        ),
        ([*FP8_70B, "reshard.transport=disk", "reshard.folder=/tmp"], "reshard.transport=disk does not go with server"),
        ([*FP8_70B, "server.colocate=true"], "server.colocate=true does not go with server.quantization=fp8"),
        ([*FP8_70B, "server.dtype=float32"], "server.dtype=float32 does not go with server.quantization=fp8: SGLang's"),
        (
            [*FP8_70B, "actor.lora.rank=8", "actor.lora.sync=adapters"],
            "actor.lora.sync=adapters does not go with server.quantization=fp8: the base would never be quantised",
        ),
        (
            [*INT4_70B, "server.dtype=float16"],
            "server.dtype=float16 does not go with server.quantization=int4: scales in bfloat16 lose bits there",
        ),
        (
            [RL, "server.quantization=int4", "server.device=cuda", "server.dtype=bfloat16"],
            "server ranks at server.tp_size=1 hold columns 0 to 64 of self_attn.q_proj.weight, no whole blocks; take a",
        ),
        (
            [RL, "server.quantization_aware=true"],
            "server.quantization_aware=true rounds as server.quantization=none says: not at all; set that to a format",
        ),
        ([*FP8_70B, "server.quantization_aware=true", "actor.lora.rank=8"], "weights that actor.lora.rank=8 freezes"),
        (
            [*FP8_70B, "server.quantization_aware=true", "actor.fp8=blockwise"],
            "actor.fp8=blockwise keeps copies; set fp8=off, or set quantization_aware=false",
        ),
        (
            [*FP8_70B, "+sglang.load_format=auto"],
            "sglang.load_format='auto' cannot be set with server.quantization=fp8, which needs it; leave it out",
        ),
        ([RL, "train_dataset.max_length=null"], "train_dataset.max_length is not set; give the longest prompt"),
        ([RL, "valid_dataset.max_length=null"], "valid_dataset.max_length is not set"),
        ([SFT, "train_dataset.max_length=null"], "train_dataset.max_length is not set; give the longest row"),
        ([RL, "gconfig.max_new_tokens=500"], "= 564 exceeds the model's max_position_embeddings=512"),
        ([SFT, "train_dataset.max_length=600"], "max_length=600 exceeds the model's max_position_embeddings=512"),
    ],
)
def test_knobs_that_contradict_the_model_are_refused(overrides: list[str], message: str) -> None:
    failed = of_model(config_of(*overrides))
    assert any(message in text for text in failed), failed


def test_quantised_experts_that_server_ranks_would_cut_are_accepted_where_they_are_spread() -> None:
    recipe = ["+experiment=grpo_moe_235b", "server.quantization=fp8"]
    packed = [*recipe[:1], "server.quantization=int4"]
    model = read_config(str(folder_of("Qwen/Qwen3-235B-A22B")))
    cut = checks.failures(checks.model_checks(config_of(*recipe), model))
    assert len(cut) == 1
    assert "server ranks at server.tp_size=8 hold rows 0 to 192 of mlp.experts.0.gate_proj.weight" in cut[0]
    assert checks.failures(checks.model_checks(config_of(*recipe, "+sglang.ep_size=8"), model)) == []
    assert checks.failures(checks.model_checks(config_of(*packed, "+sglang.ep_size=8"), model)) == []


def test_layers_that_sglangs_kernel_for_4_bits_would_cut_are_refused_on_gpus() -> None:
    model = read_config(str(folder_of("Qwen/Qwen3-0.6B")))
    model.num_key_value_heads, model.head_dim = 2, 40
    model.num_attention_heads = 16
    (failed,) = checks.failures(checks.model_checks(config_of(RL, *GPU_SERVER, "server.quantization=int4"), model))
    assert "server.tp_size=1 holds 800 rows of self_attn.qkv_proj.weight_packed, and SGLang's kernel takes" in failed


def test_servers_whose_ep_size_is_null_have_sglangs_own() -> None:
    assert server_ep_size(config_of("+sglang.ep_size=null")) == 1


def test_an_evaluation_without_a_trainer_has_no_quantised_servers() -> None:
    with pytest.raises(
        UserError, match=r"server.quantization=fp8 needs a trainer, which brings the weights; set it to"
    ):
        evaluate.main(config_of(RL, "server.quantization=fp8"))


def test_adapters_alone_are_accepted_for_the_bundled_model() -> None:
    assert of_model(config_of(*ADAPTERS, "actor.lora.targets=[v_proj]", "server.tp_size=2")) == []
    names = [f"+adapters.{name}=[]" for name in ("math", "code-2", "_", *(f"a{i}" for i in range(61)))]
    assert of_model(config_of(*ADAPTERS, *names)) == []


def test_all_failures_are_listed_each_once() -> None:
    config = config_of(RL, "actor.temperature=0.5", "parallel.vpp_size=2", "actor.max_tokens_per_mb=80")
    failed = of_config(config)
    assert len(failed) == len(set(failed)) == 3
    with pytest.raises(UserError, match=re.escape(failed[0])):
        run_all(checks.config_checks(config))


def test_a_supervised_run_may_leave_the_held_out_rows_unlimited() -> None:
    assert of_model(config_of(SFT, "valid_dataset.max_length=null")) == []


def test_a_layout_that_does_not_make_the_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "3")
    assert any("the world has 3 ranks" in text for text in of_model(config_of(SFT, "parallel.tp_size=2")))


def test_every_rule_of_the_file_is_in_a_list() -> None:
    tree = ast.parse(Path(checks.__file__).read_text())
    rules = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("_check")}
    listed = {
        name.id
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_checks")
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    }
    assert len(rules) > 10
    assert rules <= listed


def test_servers_on_cpu_may_pad_their_heads() -> None:
    assert of_model(config_of(RL, "server.tp_size=3", "server.device=cpu")) == []


def test_a_deterministic_run_refuses_what_its_sums_do_not_cover() -> None:
    exact = config_of(RL, "deterministic=true", "server.tp_size=4")
    assert any("would pad this model's num_attention_heads=4 to 8; lower the sizes" in text for text in of_model(exact))
    biased = LlamaConfig(attention_bias=True)
    message = "deterministic=true with server.tp_size=4 does not cover the bias of attention's output"
    assert any(message in text for text in checks.failures(served_checks.served_checks(exact, biased)))
    on_trainer = config_of(RL, "deterministic=true", "parallel.tp_size=4")
    assert not any("bias" in text for text in checks.failures(served_checks.served_checks(on_trainer, biased)))
    for override, message in (
        ("+sglang.ep_size=2", "deterministic=true takes sglang.ep_size=1, and it is 2"),
        ("algorithm.routing_replay=rollout", "has nothing to replay with deterministic=true"),
    ):
        config = config_of(RL, "deterministic=true", override)
        found = checks.failures(served_checks.served_checks(config, Qwen3MoeConfig(num_experts=4)))
        assert any(message in text for text in found), found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.routing_replay=rollout"], ""),
        (["algorithm.routing_replay=proximal", "algorithm.n_minibatches=2"], ""),
        (
            ["algorithm.routing_replay=rollout", "rollout.rollout_func=my.function"],
            "algorithm.routing_replay=rollout needs the servers' choice of experts, and rollout.rollout_func=my.functio"
            "n returns tokens alone; use a workflow, or set it to off",
        ),
        (
            ["algorithm.routing_replay=rollout", "+sglang.speculative_algorithm=NGRAM"],
            "algorithm.routing_replay=rollout: with sglang.speculative_algorithm=NGRAM SGLang does not record experts; "
            "leave speculative_algorithm out",
        ),
        *(
            (
                ["algorithm.routing_replay=rollout", f"+sglang.{option}=true"],
                f"algorithm.routing_replay=rollout: with sglang.{option}=True SGLang does not record experts; leave "
                f"{option} out",
            )
            for option in ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_two_batch_overlap")
        ),
        (
            ["algorithm.routing_replay=rollout", "+sglang.enable_return_routed_experts=false"],
            "algorithm.routing_replay=rollout: with sglang.enable_return_routed_experts=False SGLang does not record "
            "experts; leave enable_return_routed_experts out",
        ),
    ],
)
def test_replay_of_experts_wants_their_choice(overrides: list[str], message: str) -> None:
    config = config_of(RL, *overrides)
    moe = Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2)
    assert checks.failures(served_checks.served_checks(config, moe)) == ([message] if message else [])
    found = checks.failures(served_checks.served_checks(config, read_config(str(TINY))))
    assert found == [
        f"{overrides[0]} replays the choice of experts, and qwen3 is dense; set it to off",
    ]


@pytest.mark.parametrize(
    ("model", "layer", "has", "lacks"),
    [
        (Qwen3MoeConfig(num_experts=4, num_hidden_layers=4, mlp_only_layers=[2]), 2, "an MLP", "experts"),
        (Qwen3MoeConfig(num_experts=4, num_hidden_layers=4, decoder_sparse_step=2), 0, "an MLP", "experts"),
        (Qwen3NextConfig(num_experts=4, num_hidden_layers=4, mlp_only_layers=[3]), 3, "an MLP", "experts"),
        (
            Glm4MoeLiteConfig(mlp_layer_types=["sparse"] * 4, num_hidden_layers=4, first_k_dense_replace=1),
            *(0, "experts", "an MLP"),
        ),
    ],
)
def test_servers_want_experts_in_the_layers_that_sglang_gives_them(
    model: PretrainedConfig, layer: int, has: str, lacks: str
) -> None:
    """As test_recorded_routes.py finds in SGLang's own classes."""
    found = checks.failures(served_checks.served_checks(config_of(RL, "server.device=cuda"), model))
    message = f"layer {layer} of this {model.model_type} model has {has}, and SGLang gives it {lacks}: it reads no "
    assert len([text for text in found if text.startswith(message)]) == 1, found


@pytest.mark.parametrize(
    "model",
    [
        Qwen3MoeConfig(num_experts=4),
        Qwen3NextConfig(num_experts=4),
        Glm4MoeConfig(num_hidden_layers=4, first_k_dense_replace=2),
        Glm4MoeLiteConfig(num_hidden_layers=4, first_k_dense_replace=1),
        GptOssConfig(num_hidden_layers=2),
        DeepseekV3Config(num_hidden_layers=4),
    ],
)
def test_servers_take_every_family_with_experts_where_sglang_has_them(model: PretrainedConfig) -> None:
    found = checks.failures(served_checks.served_checks(config_of(RL, "server.device=cuda"), model))
    assert not [text for text in found if "SGLang gives it" in text]


def test_proximal_replay_wants_a_pass_of_its_own() -> None:
    assert of_config(config_of(RL, "algorithm.routing_replay=proximal", "algorithm.n_minibatches=1")) == [
        "algorithm.routing_replay=proximal with algorithm.n_minibatches=1 replays nothing: the update's own pass is "
        "the proximal one; set n_minibatches above 1, or routing_replay=off"
    ]
