"""Block FP8 checkpoints, as DeepSeek-V3 and Kimi-K2 are published: read by box, refused if damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from megarl import export
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.weights import hf_weights
from megarl.actor.weights.block_fp8 import SCALE, BlockFp8
from megarl.actor.weights.hf_files import Checkpoint
from megarl.actor.weights.shards import shard_specs, tensor_shapes
from megarl.config import SaverConfig
from megarl.families import quantisation, read_config
from megarl.knobs import UserError
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.parallel.placement import places
from megarl.trainer.checkpoints.saver import ACTOR, Saver
from tests.conftest import random_model, save_model

PLAIN = ("embed_tokens.weight", "lm_head.weight", "norm.weight", ".gate.weight", ".e_score_correction_bias")
BLOCKS = [(128, 128), (16, 24), (7, 5)]  # hidden 64 and width 48: one ragged block, some whole ones, many ragged ones
MTP = ("model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight")


def converted(elements: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """DeepSeek's conversion to bfloat16 (inference/fp8_cast_bf16.py), a block at a time."""
    result = torch.empty(elements.shape, dtype=torch.bfloat16)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            result[part] = (elements[part].to(torch.float32) * scales[i, j]).to(torch.bfloat16)
    return result


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, tuple[int, int]], Path]:
    """A random model with an MTP layer, its projections in FP8 with random scales, all else in bfloat16."""
    made: dict[tuple[str, tuple[int, int]], Path] = {}

    def folder(family: str, block: tuple[int, int]) -> Path:
        if (family, block) not in made:
            made[family, block] = path = tmp_path_factory.mktemp("quantised")
            save_model(family, random_model(family, tied=False, num_nextn_predict_layers=1), path)
            generator = torch.Generator().manual_seed(0)
            tensors, plain = {}, load_file(path / "model.safetensors")
            plain |= {MTP[0]: torch.randn(64, 128, generator=generator), MTP[1]: torch.ones(64)}
            for name, tensor in plain.items():
                if name.endswith(PLAIN):
                    tensors[name] = tensor if "bias" in name else tensor.bfloat16()
                    continue
                blocks = tuple(-(-size // edge) for size, edge in zip(tensor.shape, block, strict=True))
                tensors[name] = (tensor * 300).clamp(-448, 448).to(torch.float8_e4m3fn)
                tensors[name + SCALE] = torch.rand(blocks, generator=generator) / 300 + 1e-4
            fields = json.loads((path / "config.json").read_text())
            fields["quantization_config"] = {
                "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block)
            }  # fmt: skip
            write(path, tensors, {**fields, "dtype": "bfloat16"})
        return made[family, block]

    return folder


def conversion(folder: Path, block: tuple[int, int]) -> dict[str, Tensor]:
    """All tensors of a checkpoint after DeepSeek's conversion."""
    stored = load_file(folder / "model.safetensors")
    return {
        name: converted(tensor, stored[name + SCALE], block) if name + SCALE in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith(SCALE)
    }


@pytest.fixture(autouse=True)
def no_groups_stay() -> Iterator[None]:
    yield
    groups.destroy()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(128, 128), (3, 4)])
def test_every_element_is_scaled_as_in_transformers(
    dtype: torch.dtype, block: tuple[int, int], stored: torch.dtype, tmp_path: Path
) -> None:
    """transformers takes whole blocks alone. `stored` is the dtype of the scales."""
    rows, columns = 3 * block[0], 2 * block[1]
    elements = torch.arange(rows * columns).to(torch.uint8).view(rows, columns).view(torch.float8_e4m3fn)
    scales = (torch.rand(3, 2) * 10.0 ** torch.randint(-6, 3, (3, 2))).to(stored)
    save_file({"x": elements, "x" + SCALE: scales}, tmp_path / "model.safetensors")
    file = safe_open(tmp_path / "model.safetensors", framework="pt")
    read = BlockFp8(file, "x", file, block).read((slice(0, rows), slice(0, columns)))
    expected = Fp8Dequantize(None)._dequantize_one(elements, scales.float(), dtype)
    torch.testing.assert_close(read.to(dtype), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_each_rank_reads_its_boxes_of_the_conversion(
    family: str, block: tuple[int, int], quantised: Callable[[str, tuple[int, int]], Path]
) -> None:
    """Cuts by tensor parallelism fall inside of blocks: rows and columns of 64, 48 and 24."""
    folder = quantised(family, block)
    expected, config = conversion(folder, block), read_config(str(folder))
    checkpoint = Checkpoint(str(folder), config)
    assert quantisation(config) == "fp8"
    assert checkpoint.names() == set(expected) == {*tensor_shapes(config), *MTP}
    for parallel in (
        ParallelConfig(),
        ParallelConfig(tp_size=2, pp_size=2),
        ParallelConfig(dp_size=4, ep_size=2, etp_size=2),
    ):
        for place in places(parallel):
            for spec in shard_specs(config, parallel, place):
                box = tuple(map(slice, spec.start, spec.stop))
                read = checkpoint.read(spec.name, spec.shape, box)
                assert torch.equal(read.to(expected[spec.name].dtype), expected[spec.name][box]), spec


def test_scales_of_other_blocks_are_not_read(quantised: Callable[[str, tuple[int, int]], Path], tmp_path: Path) -> None:
    folder, block = quantised("deepseek_v3", (16, 24)), (16, 24)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    tensors[name + SCALE][2, 1] = float("nan")  # rows 32 to 47, columns 24 to 47
    write(tmp_path, tensors, json.loads((folder / "config.json").read_text()))
    checkpoint, expected = Checkpoint(str(tmp_path), read_config(str(tmp_path))), conversion(folder, block)[name]
    for box in ((slice(0, 32), slice(0, 64)), (slice(20, 64), slice(48, 63)), (slice(48, 49), slice(25, 26))):
        assert torch.equal(checkpoint.read(name, expected.shape, box).bfloat16(), expected[box])
    for box in ((slice(31, 33), slice(24, 25)), (slice(47, 48), slice(0, 64))):
        with pytest.raises(UserError, match=rf"{name}{SCALE} has scales that are negative or no finite number; copy"):
            checkpoint.read(name, expected.shape, box)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_rounds_the_products_once(dtype: str, quantised: Callable[[str, tuple[int, int]], Path]) -> None:
    folder = quantised("deepseek_v3", (16, 24))
    stored = load_file(folder / "model.safetensors")
    engine = MegatronEngine(EngineConfig(path=str(folder), dtype=dtype))
    engine.initialize()
    for shard in hf_weights.shards(engine.modules, engine.hf_config, engine.groups):
        full = stored[shard.name].float()
        if (scales := stored.get(shard.name + SCALE)) is not None:
            rows, columns = full.shape
            full = full * scales.repeat_interleave(16, 0)[:rows].repeat_interleave(24, 1)[:, :columns]
        assert torch.equal(shard.view, full[shard.index].to(shard.view.dtype)), shard.name
    engine.destroy()


def check_plain(folder: Path, expected: dict[str, Tensor]) -> None:
    """Compares a checkpoint bit for bit, and finds no word of a quantisation in its config."""
    written = load_file(folder / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name], tensor), name
    fields = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in fields
    assert fields["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k2", "qwen3_moe"])
def test_a_checkpoint_is_written_as_deepseeks_conversion(
    family: str,
    quantised: Callable[[str, tuple[int, int]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With its MTP layer, by the command, by an engine, and from a run's checkpoint."""
    folder = quantised(family, (16, 24))
    expected = conversion(folder, (16, 24))
    for knobs in ({}, {"dtype": "bfloat16"}):
        output = tmp_path / f"command{len(knobs)}"
        export.export(export.ExportConfig(checkpoint=str(folder), output=str(output), **knobs))
        check_plain(output, expected)
        assert re.search(r"rounded [1-9][\d,]* of [\d,]+ weights from the stored values", capsys.readouterr().out)
    engine = MegatronEngine(EngineConfig(path=str(folder), dtype="bfloat16"))
    engine.initialize()
    engine.save(tmp_path / "saved")
    check_plain(tmp_path / "saved", expected)
    assert read_config(str(tmp_path / "saved")).model_type == family
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    Saver(SaverConfig(asynchronous=False), tmp_path / "run" / "checkpoints", print).save({ACTOR: engine}, 1, {})
    engine.destroy()
    assert export.main([f"checkpoint={tmp_path / 'run'}", f"output={tmp_path / 'of_run'}"]) == 0
    check_plain(tmp_path / "of_run", expected)


UP = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({UP + SCALE: None}, f"{UP} is in 8 bits, and lacks its scales {UP}{SCALE}; copy or download"),
        ({UP: None}, f"has {UP}{SCALE} and lacks {UP}; copy or download"),
        (
            {UP + SCALE: torch.ones(3, 2)},
            r"has shape \(3, 2\), and \(48, 64\) weights in .* \(16, 24\) have \(3, 3\)",
        ),
        ({UP + SCALE: torch.ones(3, 3).half()}, f"{UP}{SCALE} has dtype F16 .* their scales F32 or BF16"),
        ({UP: torch.ones(48, 64)}, f"{UP} has dtype F32 and shape .* block FP8 weights are F8_E4M3"),
        ({UP: torch.ones(48, 64).to(torch.float8_e5m2)}, f"{UP} has dtype F8_E5M2"),
        (
            {UP: torch.ones(1, 48, 64).to(torch.float8_e4m3fn)},
            r"E4M3 and shape \(1, 48, 64\).* both matrices",
        ),
        ({UP + SCALE: torch.full((3, 3), -1.0)}, f"{UP}{SCALE} has scales that are negative"),
        ({UP + SCALE: torch.full((3, 3), torch.inf)}, f"{UP}{SCALE} has scales that are negative or no finite"),
    ],
)
def test_damaged_scales_are_refused_in_one_line(
    change: dict[str, Tensor | None], message: str, quantised: Callable[[str, tuple[int, int]], Path], tmp_path: Path
) -> None:
    folder = quantised("deepseek_v3", (16, 24))
    tensors = {**load_file(folder / "model.safetensors"), **change}
    write(
        tmp_path / "damaged",
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        json.loads((folder / "config.json").read_text()),
    )
    config = read_config(str(tmp_path / "damaged"))
    with pytest.raises(UserError, match=message) as refusal:
        Checkpoint(str(tmp_path / "damaged"), config).read(UP, (48, 64), (slice(0, 48), slice(0, 64)))
    assert "\n" not in str(refusal.value)


def test_fp8_weights_of_a_plain_config_are_refused(
    quantised: Callable[[str, tuple[int, int]], Path], tmp_path: Path
) -> None:
    """They were read without their scales."""
    folder = quantised("deepseek_v3", (16, 24))
    fields = json.loads((folder / "config.json").read_text())
    del fields["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    for scales in (True, False):
        kept = {name: tensor for name, tensor in tensors.items() if scales or not name.endswith(SCALE)}
        write(tmp_path / "plain", kept, fields)
        with pytest.raises(UserError, match=r"is in 8 bits, and config.json has no quantization_config") as refusal:
            Checkpoint(str(tmp_path / "plain"), read_config(str(tmp_path / "plain")))
        assert "\n" not in str(refusal.value)
