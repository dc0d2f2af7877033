"""The actor refuses unsupported checkpoints and layouts in one line, before Megatron is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.actor.checks import check_layout
from megarl.families import decoder, padded_vocab_size, read_config
from megarl.hub import local_folder
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig

PARTIAL_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen3",
            {"model_type": "mamba"},
            "'mamba' model; supported are .*llama, mistral, mixtral, qwen2, qwen3, ",
        ),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act=gelu; supported is silu"),
        ("llama", {"mlp_bias": True}, "mlp_bias=true"),
        ("qwen3", {"model_type": "gemma2"}, "'gemma2' model, which has logit soft-capping: not supported; supported"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0; it must be at least 1, or null"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0; supported is null"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True; supported is false"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation=silu; supported is gelu_pytorch_tanh"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, r"swiglu_alpha=1\.5; supported is 1\.702"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias=False; supported is true"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "weights quantised by 'gptq', which are not"),
        ("qwen3", {"quantization_config": {"quant_method": "mxfp4"}}, "weights quantised by 'mxfp4', which are not"),
        ("llama", {"attention_dropout": 0.1}, r"attention_dropout=0\.1, which megarl does not apply; set it to 0"),
        ("qwen3", {"head_dim": 15}, "even rotary dimension, but got `head_dim`=15"),
        ("llama", {"head_dim": None, "hidden_size": 60}, "even rotary dimension, but got `head_dim`=15"),
        ("qwen3", {"vocab_size": 0}, "vocab_size=0 in config.json; it must be at least 1"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0 in config.json; it must be at least 1"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: routing must be deterministic"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5; it must be from 1 to 4"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 and normalised weights"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok=0; it must be from 1 to 8"),
        ("qwen3_moe", {"decoder_sparse_step": 3}, "'qwen3_moe' model with 8 experts in 0 layers"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "8 experts in 0 layers; give it at least one"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func=softmax; supported is sigmoid"),
        ("deepseek_v3", {"topk_method": "group_limited_greedy"}, "topk_method=.*; supported is noaux_tc"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False; supported is True"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=true; latent attention has no biases"),
        ("deepseek_v3", {"n_group": 3}, "n_group=3 and topk_group=2: the groups must divide 8 experts"),
        ("deepseek_v3", {"topk_group": 5}, "n_group=4 and topk_group=5: .* from 1 to n_group"),
        ("deepseek_v3", {"num_experts_per_tok": 3}, "=3 and topk_group=2; supported are twice as many"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "in FP8 and weight_block_size=None in conf"),
        ("qwen3", {"quantization_config": {**FP8, "weight_block_size": [128, 0]}}, r"block_size=\[128, 0\] in conf"),
        ("deepseek_v3", {"quantization_config": {**FP8, "fmt": "e5m2"}}, "in FP8 with fmt=e5m2; supported is e4m3"),
        (
            "qwen3",
            {"quantization_config": {**FP8, "activation_scheme": "static"}},
            "static; supported is dynamic",
        ),
        ("gpt_oss", {"quantization_config": FP8}, "weights quantised by 'fp8', which are not"),
        ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave=False; supported is True"),
        ("glm4_moe", {"rope_parameters": PARTIAL_YARN}, "rope_type=yarn and heads rotated in part"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type=dynamic"),
    ],
)
def test_an_unsupported_config_is_refused(
    family: str, change: dict[str, Any], message: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    fields = json.loads((checkpoints(family, tied=True) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises(UserError, match=message) as refusal:
        read_config(str(tmp_path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/at/all", "is not a folder"),
        ("./missing", "is not a folder"),
        ("three/part/name", "is not a folder"),
        ("no-such-org/no-such-model", "could not be fetched from the hub .* actor.path=DIR"),
    ],
)
def test_a_model_that_is_nowhere_is_refused(path: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message):
        local_folder(path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        read_config(str(tmp_path))


def test_a_run_as_model_is_refused_with_its_final_model(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    with pytest.raises(UserError, match=r"holds no config\.json; give the folder of a HF checkpoint"):
        local_folder(str(tmp_path))
    (tmp_path / "hf" / "config.json").touch()
    with pytest.raises(UserError, match=rf"holds no config\.json; give its final model, {tmp_path / 'hf'}$"):
        local_folder(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": "qwen3", "vocab_size": "many"}', "\0"])
def test_a_damaged_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="has no readable HF config") as refusal:
        read_config(str(tmp_path))
    assert "\n" not in str(refusal.value)


def test_windows_are_read_by_layer(checkpoints: Callable[..., Path]) -> None:
    """A window as long as the model is full attention."""
    windowed = {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 4}
    for family, fields, expected in (
        ("mistral", {"sliding_window": 512}, [0, 0]),
        ("mistral", {"sliding_window": 511}, [511, 511]),
        ("mixtral", {"sliding_window": 9}, [9, 9]),
        ("qwen2", {**windowed, "max_window_layers": 3}, [0, 0, 0, 9]),
        ("qwen3", {**windowed, "max_window_layers": 1}, [0, 9, 9, 9]),
        ("qwen3", {**windowed, "use_sliding_window": False}, [0, 0, 0, 0]),
        ("qwen3_moe", windowed, [9, 9, 9, 9]),
        ("gpt_oss", {"num_hidden_layers": 4}, [8, 0, 8, 0]),
        ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 9}, [9, 9, 9, 9, 9, 0, 9]),
    ):
        model = decoder(read_config(str(checkpoints(family, tied=family == "gemma3_text", **fields))))
        assert [layer.attention.window for layer in model.layers] == expected, family


@pytest.mark.parametrize(
    ("family", "layout", "message"),
    [
        ("qwen3", {"tp_size": 3}, "tp_size=3 does not divide the model's num_attention_heads=4"),
        ("qwen3", {"pp_size": 3}, "pp_size=3 does not divide the model's 2 layers"),
        ("qwen3", {"ep_size": 2, "dp_size": 2}, "ep_size=2 lays out experts, and this qwen3 model has none"),
        ("llama", {"etp_size": 2, "dp_size": 2}, "etp_size=2 lays out experts, and this llama model has none"),
        ("mistral", {"tp_size": 2, "etp_size": 1}, "etp_size=1 lays out experts, and this mistral model has none"),
        ("mixtral", {"ep_size": 3, "dp_size": 3}, "ep_size=3 does not divide the model's 4 experts"),
        ("qwen3_moe", {"ep_size": 16, "dp_size": 16}, "ep_size=16 does not divide the model's 8 experts"),
        ("qwen3_moe", {"etp_size": 5, "dp_size": 5}, "etp_size=5 does not divide the 48 rows of an expert"),
        ("qwen3_moe", {"tp_size": 2}, "tp_size=2 with a mixture of experts needs parallel.sequence_parallel=true"),
        ("mixtral", {"tp_size": 8, "sequence_parallel": True}, "tp_size=8 does not divide the model's num_attention"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(
    family: str, layout: dict[str, int], message: str, checkpoints: Callable[..., Path]
) -> None:
    config = read_config(str(checkpoints(family, tied=True)))
    with pytest.raises(UserError, match=message) as refusal:
        check_layout(config, ParallelConfig(**layout))
    assert "\n" not in str(refusal.value)


def test_a_dense_width_that_no_layer_has_is_not_asked_to_divide(checkpoints: Callable[..., Path]) -> None:
    config = read_config(str(checkpoints("qwen3_moe", tied=True, intermediate_size=191)))
    check_layout(config, ParallelConfig(tp_size=2, sequence_parallel=True))


@pytest.mark.parametrize(("world", "fits"), [("4", True), ("6", False), ("2", False)])
def test_a_world_that_the_layout_does_not_make_is_refused(world: str, fits: bool, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    parallel = ParallelConfig(tp_size=2, pp_size=2)
    if fits:
        assert parallel.world_size() == 4
    else:
        with pytest.raises(UserError, match=f"the world has {world} ranks"):
            parallel.world_size()


@pytest.mark.parametrize(("size", "tp", "padded"), [(343, 1, 344), (344, 1, 344), (343, 2, 352), (352, 2, 352)])
def test_a_vocabulary_is_padded_to_whole_shards(
    size: int, tp: int, padded: int, checkpoints: Callable[..., Path]
) -> None:
    config = read_config(str(checkpoints("qwen3", tied=True)))
    config.vocab_size = size
    assert padded_vocab_size(config, tp) == padded
