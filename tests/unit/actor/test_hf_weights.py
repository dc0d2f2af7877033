"""HF checkpoints: formats of experts, refused files, and the binding of parameters to the shard table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.actor.engine import EngineConfig, MegatronEngine
from megarl.actor.weights import hf_weights
from megarl.actor.weights.hf_files import Checkpoint
from megarl.actor.weights.shard_spec import ShardSpec
from megarl.actor.weights.shards import shard_specs, tensor_shapes
from megarl.families import read_config
from megarl.knobs import UserError
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.parallel.placement import places
from tests.conftest import random_model

MOE = {
    "mixtral": {"family": "mixtral", "tied": False},
    "qwen3_moe": {"family": "qwen3_moe", "tied": True, "mlp_only_layers": [0]},
}


@pytest.mark.parametrize("name", MOE)
def test_experts_stored_in_one_tensor_are_read_one_by_one(name: str, tmp_path: Path) -> None:
    model = random_model(**MOE[name])
    model.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    plain, fused = (load_file(tmp_path / kind / "model.safetensors") for kind in ("plain", "fused"))
    assert any(key.endswith("experts.gate_up_proj") for key in fused)
    assert not any(key.endswith("experts.gate_up_proj") for key in plain)
    config = read_config(str(tmp_path / "fused"))
    checkpoint = Checkpoint(str(tmp_path / "fused"), config)
    assert checkpoint.names() == set(plain) == set(tensor_shapes(config))
    for parallel in (ParallelConfig(), ParallelConfig(dp_size=4, ep_size=2, etp_size=2)):
        for place in places(parallel):
            for spec in shard_specs(config, parallel, place):
                box = tuple(map(slice, spec.start, spec.stop))
                assert torch.equal(checkpoint.read(spec.name, spec.shape, box), plain[spec.name][box]), spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.1.mlp.experts.7.up_proj.weight": None},
            r"lacks the tensor .*1\.mlp\.experts\.7\.up",
        ),
        ({"model.layers.1.mlp.gate.weight": None}, r"lacks the tensor model\.layers\.1\.mlp\.gate\.weight"),
        ({"model.layers.1.mlp.experts.8.up_proj.weight": torch.ones(1)}, r"has the tensor .*experts\.8\.up_proj"),
        ({"model.layers.1.mlp.shared_expert.bias": torch.ones(1)}, r"shared_expert\.bias, unknown to qwen3_moe"),
    ],
)
@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_missing_or_left_over_tensor_is_seen_from_every_stage(
    pp_size: int, change: dict[str, Any], message: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoints(**MOE["qwen3_moe"])
    tensors = {**load_file(source / "model.safetensors"), **change}
    save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    engine = MegatronEngine(EngineConfig(path=str(tmp_path)), ParallelConfig(pp_size=pp_size))
    with pytest.raises(UserError, match=message) as refusal:  # raised before any module or group is used
        hf_weights.load([], engine.hf_config, None, str(tmp_path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", MOE)
def test_live_parameters_are_those_of_the_table(name: str, checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints(**MOE[name])
    engine = MegatronEngine(EngineConfig(path=str(folder)))
    engine.initialize()
    try:
        stored = load_file(folder / "model.safetensors")
        live = hf_weights.shards(engine.modules, engine.hf_config, engine.groups)
        for shard in live:
            assert torch.equal(shard.view, stored[shard.name][shard.index]), shard.name
        padding = sum(p.numel() for p in hf_weights.parameters(engine.modules)) - sum(s.view.numel() for s in live)
        assert 0 <= padding <= 2 * 7 * engine.hf_config.hidden_size  # at most 7 rows of each of two embeddings
        engine.modules[0].register_parameter("stray", torch.nn.Parameter(torch.zeros(1)))
        with pytest.raises(RuntimeError, match="stray holds no HF tensor"):
            hf_weights.shards(engine.modules, engine.hf_config, engine.groups)
        norm = next(p for n, p in engine.modules[0].named_parameters() if n.endswith("final_layernorm.weight"))
        norm.data = norm.data[:-1]
        with pytest.raises(RuntimeError, match=r"final_layernorm\.weight has shape \(63,\), too small for"):
            hf_weights.shards(engine.modules, engine.hf_config, engine.groups)
    finally:
        groups.destroy()


@pytest.mark.parametrize(
    ("local", "fused"),
    [
        ("layers.3.input_layernorm.weight", "layers.3.self_attention.linear_qkv.layer_norm_weight"),
        ("layers.0.pre_mlp_layernorm.weight", "layers.0.mlp.linear_fc1.layer_norm_weight"),
        ("layers.3.input_layernorm.weight", "layers.3.self_attention.linear_qkv.norm.weight"),
        ("layers.0.pre_mlp_layernorm.weight", "layers.0.mlp.linear_fc1.norm.weight"),
        ("layers.1.mlp.experts.local_experts.12.linear_fc2.weight", "layers.1.mlp.experts.linear_fc2.weight12"),
        ("layers.1.mlp.router.weight", "layers.1.mlp.router.weight"),
    ],
)
def test_a_parameter_that_transformer_engine_fuses_is_found(local: str, fused: str) -> None:
    param = torch.nn.Parameter(torch.zeros(1))
    assert hf_weights.native({fused: param}, ShardSpec("x", (1,), (0,), (1,), 0, local, (0,))) == (fused, param)
    with pytest.raises(RuntimeError, match="is in no module of this rank"):
        hf_weights.native({}, ShardSpec("x", (1,), (0,), (1,), 0, local, (0,)))
