"""gpt-oss's experts: read from one tensor a layer or from MXFP4 blocks, and written back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl import export
from megarl.actor.weights import hf_files
from megarl.actor.weights.fused_experts import fuse
from megarl.actor.weights.mxfp4 import dequantise
from megarl.actor.weights.shards import tensor_shapes
from megarl.families import decoder, quantisation, read_config
from megarl.knobs import UserError


@pytest.fixture(scope="module")
def plain(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("gpt_oss", tied=False, num_local_experts=3)


@pytest.fixture(scope="module")
def packed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with random MXFP4 blocks in place of its experts' weights, and everything else in bfloat16."""
    folder, generator = tmp_path_factory.mktemp("packed"), torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        experts, columns, rows = tensor.shape
        for kind, shape, low, high in (("blocks", (columns // 32, 16), 0, 256), ("scales", (columns // 32,), 110, 130)):
            values = torch.randint(low, high, (experts, rows, *shape), generator=generator, dtype=torch.uint8)
            tensors[f"{name}_{kind}"] = values
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((plain / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**fields, "dtype": "bfloat16"}))
    return folder


@pytest.mark.parametrize("first", [0, 60, 120, 180, 196])
def test_mxfp4_is_dequantised_as_in_transformers(first: int) -> None:
    """Every element at every scale, bit for bit; the largest scale is no number."""
    generator = torch.Generator().manual_seed(first)
    blocks = torch.randint(0, 256, (3, 5, 4, 16), generator=generator, dtype=torch.uint8)
    blocks.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    scales = (torch.arange(60) + first).to(torch.uint8).view(3, 5, 4)
    expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    torch.testing.assert_close(dequantise(blocks, scales), expected, rtol=0, atol=0, equal_nan=True)


def test_boxes_of_experts_are_read_from_fused_tensors(plain: Path) -> None:
    config, stored = read_config(str(plain)), load_file(plain / "model.safetensors")
    checkpoint, prefix = hf_files.Checkpoint(str(plain), config), "model.layers.1.mlp.experts"
    assert checkpoint.names() == set(tensor_shapes(config))
    gate_up, bias = stored[f"{prefix}.gate_up_proj"][2], stored[f"{prefix}.gate_up_proj_bias"][2]
    down = stored[f"{prefix}.down_proj"][2]
    box = (slice(5, 37), slice(3, 50))
    for part, turn in (("gate", 0), ("up", 1)):
        read = checkpoint.read(f"{prefix}.2.{part}_proj.weight", (64, 64), box)
        assert torch.equal(read, gate_up[:, turn::2].t()[box])
        read = checkpoint.read(f"{prefix}.2.{part}_proj.bias", (64,), box[:1])
        assert torch.equal(read, bias[turn::2][box[0]])
    assert torch.equal(checkpoint.read(f"{prefix}.2.down_proj.weight", (64, 64), box), down.t()[box])
    with pytest.raises(UserError, match=r"gate_up_proj has shape \(3, 64, 128\), the config asks for \(64, 96\)"):
        checkpoint.read(f"{prefix}.2.up_proj.weight", (48, 64), (slice(0, 48), slice(0, 64)))


def test_boxes_of_experts_are_read_from_mxfp4_blocks(packed: Path) -> None:
    config, stored = read_config(str(packed)), load_file(packed / "model.safetensors")
    checkpoint, prefix = hf_files.Checkpoint(str(packed), config), "model.layers.0.mlp.experts"
    assert quantisation(config) == "mxfp4"
    assert checkpoint.names() == set(tensor_shapes(config))
    whole = {
        name: convert_moe_packed_tensors(stored[f"{prefix}.{name}_blocks"], stored[f"{prefix}.{name}_scales"])[1]
        for name in ("gate_up_proj", "down_proj")
    }
    for box in ((slice(0, 64), slice(0, 64)), (slice(5, 37), slice(3, 50)), (slice(1, 2), slice(40, 41))):
        for part, turn in (("gate", 0), ("up", 1)):
            read = checkpoint.read(f"{prefix}.1.{part}_proj.weight", (64, 64), box)
            assert torch.equal(read, whole["gate_up_proj"][:, turn::2].t()[box])
        assert torch.equal(checkpoint.read(f"{prefix}.1.down_proj.weight", (64, 64), box), whole["down_proj"].t()[box])


def test_an_mxfp4_checkpoint_is_written_in_bfloat16(packed: Path, tmp_path: Path) -> None:
    """As transformers would have it: plain tensors, and no quantisation in the config."""
    output = tmp_path / "out"
    export.export(export.ExportConfig(checkpoint=str(packed), output=str(output)))
    stored, written = load_file(packed / "model.safetensors"), load_file(output / "model.safetensors")
    for name, tensor in written.items():
        assert tensor.dtype == torch.bfloat16
        if (blocks := stored.get(f"{name}_blocks")) is not None:
            assert torch.equal(tensor, convert_moe_packed_tensors(blocks, stored[f"{name}_scales"]))
        else:
            assert torch.equal(tensor, stored[name])
    assert {name.removesuffix("_blocks") for name in stored if not name.endswith("_scales")} == set(written)
    assert not hasattr(AutoConfig.from_pretrained(output), "quantization_config")


def test_parts_of_experts_are_fused_in_any_order(plain: Path) -> None:
    config, stored = read_config(str(plain)), load_file(plain / "model.safetensors")
    checkpoint, shapes = hf_files.Checkpoint(str(plain), config), tensor_shapes(config)
    names = sorted(shapes, reverse=True)
    parts = ((name, checkpoint.read(name, shapes[name], tuple(slice(0, n) for n in shapes[name]))) for name in names)
    fused = dict(fuse(parts, decoder(config)))
    assert fused.keys() == stored.keys()
    assert all(torch.equal(fused[name], stored[name]) for name in stored)
    with pytest.raises(AssertionError, match="gate_up_proj are missing"):
        list(fuse([(f"{'model.layers.0.mlp.experts'}.0.gate_proj.weight", torch.zeros(64, 64))], decoder(config)))
