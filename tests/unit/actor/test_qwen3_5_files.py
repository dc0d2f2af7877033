"""Multimodal Qwen3.5 checkpoints: the text part trains, and exports have every tensor as the source has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from megarl import export
from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.config import SaverConfig
from megarl.families import quantisation, read_config
from megarl.knobs import UserError
from megarl.parallel import groups
from megarl.trainer.checkpoints.saver import ACTOR, Saver
from megarl.types import PackedBatch
from tests.conftest import EXPERTS
from tests.distributed.layout_worker import loss_fn, loss_weight_fn
from tests.distributed.test_layouts import make_batch, reference_logprobs

VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 343, "max_position_embeddings": 512,
}  # fmt: skip
MTP = {"mtp.fc.weight": torch.randn(32, 64).bfloat16(), "mtp.layers.0.mlp.experts.down_proj": torch.randn(2, 3, 4)}
CONFIGS = {"qwen3_5": (Qwen3_5Config, Qwen3_5TextConfig), "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeTextConfig)}


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "qwen3_5_moe, split experts"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in bfloat16, with A_log and a norm in float32 and an MTP layer, as Qwen publishes them."""
    kind, _, split = request.param.partition(", ")
    whole, part = CONFIGS[kind]
    text = part(**TEXT, **EXPERTS[f"{kind}_text"], intermediate_size=48)
    torch.manual_seed(0)
    config = whole(text_config=text.to_dict(), vision_config=VISION, tie_word_embeddings=kind == "qwen3_5")
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(float("linear_attn.norm" in name) + 0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(kind)
    model.save_pretrained(folder, save_original_format=bool(split))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            tensors[name] = tensor.float() + 1e-4
    save_file({**tensors, **MTP}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def no_groups_stay() -> Iterator[None]:
    yield
    groups.destroy()


def assert_same(folder: Path, source: Path) -> None:
    written, stored = load_file(folder / "model.safetensors"), load_file(source / "model.safetensors")
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        assert written[name].dtype is tensor.dtype, name
        assert torch.equal(written[name], tensor), name
    assert json.loads((folder / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_every_tensor_comes_out_as_it_went_in(source: Path, tmp_path: Path) -> None:
    stored = load_file(source / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in stored)
    assert any(name.startswith("model.language_model.") for name in stored)
    engine = MegatronEngine(EngineConfig(path=str(source), dtype="bfloat16"))
    engine.initialize()
    engine.save(tmp_path / "out")
    assert_same(tmp_path / "out", source)
    engine.load(tmp_path / "out")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    Saver(SaverConfig(asynchronous=False), tmp_path / "run" / "checkpoints", print).save({ACTOR: engine}, 1, {})
    assert export.main([f"checkpoint={tmp_path / 'run'}", f"output={tmp_path / 'exported'}"]) == 0
    assert_same(tmp_path / "exported", source)


def test_projections_in_fp8_come_out_in_bfloat16(source: Path, tmp_path: Path) -> None:
    """The multimodal config says how its text part is quantised."""
    fields, plain, quantised = json.loads((source / "config.json").read_text()), {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        plain[name] = quantised[name] = tensor
        if "language_model" in name and name.endswith("_proj.weight"):
            quantised[name] = (tensor * 256).to(torch.float8_e4m3fn)
            quantised[f"{name}_scale_inv"] = torch.full([-(-size // 24) for size in tensor.shape], 1 / 256)
            plain[name] = (quantised[name].float() / 256).bfloat16()
    entry = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [24, 24]}}
    for kind, tensors, added in (("plain", plain, {}), ("quantised", quantised, entry)):
        (tmp_path / kind).mkdir()
        save_file(tensors, tmp_path / kind / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / kind / "config.json").write_text(json.dumps({**fields, **added}))
    assert quantisation(read_config(str(tmp_path / "quantised"))) == "fp8"
    engine = MegatronEngine(EngineConfig(path=str(tmp_path / "quantised"), dtype="bfloat16"))
    engine.initialize()
    engine.save(tmp_path / "saved")
    assert_same(tmp_path / "saved", tmp_path / "plain")
    assert export.main([f"checkpoint={tmp_path / 'quantised'}", f"output={tmp_path / 'exported'}"]) == 0
    assert_same(tmp_path / "exported", tmp_path / "plain")


def test_log_probs_are_those_of_the_whole_model(source: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval()
    batch = make_batch(343)
    with torch.no_grad():
        expected, _ = reference_logprobs(model, batch)
    engine = MegatronEngine(EngineConfig(path=str(source)))
    engine.initialize()
    lengths = batch["cu_seqlens"].diff()
    for ids, sequence in zip(batch["input_ids"].split(lengths.tolist()), expected.split(lengths.tolist()), strict=True):
        logprobs = engine.eval().logprobs({"input_ids": ids[None]}).flatten()
        torch.testing.assert_close(logprobs[1:], sequence[1:], rtol=0, atol=1e-5)


def test_a_run_in_bfloat16_goes_on_from_its_checkpoint(source: Path, tmp_path: Path) -> None:
    """A_log and a norm are float32 among bfloat16 parameters: steps move them, and a resumed run repeats the steps."""
    stored = make_batch(343)
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)
    config = EngineConfig(path=str(source), dtype="bfloat16", optimizer=OptimizerConfig(lr=0.01))

    def started() -> MegatronEngine:
        engine = MegatronEngine(config)
        engine.initialize()
        return engine.train()

    def step(engine: MegatronEngine) -> dict[str, Tensor]:
        engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")
        return {name: tensor.clone() for name, tensor in engine.named_weights()}

    engine = started()
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    after = step(engine)
    engine.snapshot_state().write(tmp_path)
    name = "model.layers.0.linear_attn.A_log"
    assert after[name].dtype is torch.float32
    assert after["model.layers.0.linear_attn.dt_bias"].dtype is torch.bfloat16
    assert (after[name] - before[name]).abs().min() > 1e-3
    expected = step(engine)
    resumed = started()
    resumed.load_state(tmp_path)
    assert all(torch.equal(tensor, after[name]) for name, tensor in resumed.named_weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in step(resumed).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "has layer_types of sliding_attention"),
        ({"layer_types": ["linear_attention", "linear_attention"]}, "has layers of one kind alone"),
        ({"attn_output_gate": False}, "attn_output_gate=false"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type=sigmoid"),
        ({"linear_num_value_heads": 7}, "linear_num_value_heads=7, which linear_num_key_heads=4 does not divide"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_the_actor_cannot_run_is_refused_in_one_line(
    change: dict[str, object], message: str, source: Path, tmp_path: Path
) -> None:
    fields = json.loads((source / "config.json").read_text())
    fields["text_config"] = {**fields["text_config"], **change}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=message) as refusal:
        read_config(str(tmp_path))
    assert "\n" not in str(refusal.value)
