"""Tensors of a checkpoint that the actor does not run, such as MTP layers, come out as they went in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl import export
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.weights import hf_files
from megarl.config import SaverConfig
from megarl.knobs import UserError
from megarl.parallel import groups
from megarl.trainer.checkpoints.saver import ACTOR, Saver

MTP = {  # the decoder has layers 0 and 1
    "model.layers.2.eh_proj.weight": torch.randn(64, 128),
    "model.layers.2.mlp.experts.1.up_proj.weight": torch.randn(48, 64).bfloat16(),
    "model.layers.2.mlp.gate.e_score_correction_bias": torch.randn(8),
}


@pytest.fixture
def source(checkpoints: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint whose config announces one MTP layer, which its weights have too."""
    folder = shutil.copytree(checkpoints("qwen3", tied=True, vocab_size=341), tmp_path / "source")
    save_file({**load_file(folder / "model.safetensors"), **MTP}, folder / "model.safetensors")
    set_field(folder, "num_nextn_predict_layers", 1)
    return folder


@pytest.fixture(autouse=True)
def no_groups_stay() -> Iterator[None]:
    yield
    groups.destroy()


def set_field(folder: Path, name: str, value: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))


def engine_of(folder: Path, **knobs: str | float) -> MegatronEngine:
    engine = MegatronEngine(EngineConfig(path=str(folder), dtype="bfloat16", **knobs))
    engine.initialize()
    with torch.no_grad():
        for param in engine.modules[0].parameters():
            param.mul_(1.5)
    return engine


def assert_carried(folder: Path) -> None:
    written = load_file(folder / "model.safetensors")
    for name, tensor in MTP.items():
        assert written[name].dtype is tensor.dtype
        assert torch.equal(written[name], tensor), name
    assert written["model.norm.weight"].dtype is torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("target", ["out", "source"])
def test_mtp_layers_are_saved_as_they_were_loaded(target: str, source: Path, tmp_path: Path) -> None:
    engine = engine_of(source)
    engine.save(tmp_path / target)
    assert_carried(tmp_path / target)
    engine.load(tmp_path / target)  # and read again


def test_a_checkpoint_of_a_run_names_them_and_its_export_has_them(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, run = engine_of(source), tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    Saver(SaverConfig(asynchronous=False), run / "checkpoints", print).save({ACTOR: engine}, 1, {})
    assert export.main([f"checkpoint={run}", f"output={tmp_path / 'out'}"]) == 0
    assert_carried(tmp_path / "out")
    source.rename(tmp_path / "moved")
    capsys.readouterr()
    assert export.main([f"checkpoint={run}", f"output={tmp_path / 'lost'}"]) == 2
    refusal = capsys.readouterr().err
    assert "source is gone" in refusal
    assert refusal.count("\n") == 1
    arguments = [f"checkpoint={run}", f"output={tmp_path / 'found'}", f"source={tmp_path / 'moved'}"]
    assert export.main(arguments) == 0
    assert_carried(tmp_path / "found")


def test_a_source_that_lost_them_is_refused_by_name(source: Path) -> None:
    config = engine_of(source).hf_config
    names = hf_files.carried_names(str(source), config)
    assert set(names) == set(MTP)
    kept = {name: t for name, t in load_file(source / "model.safetensors").items() if name != names[0]}
    save_file(kept, source / "model.safetensors")
    with pytest.raises(UserError, match=rf"lacks {names[0]} \(1 missing\)"):
        list(hf_files.carried_tensors(str(source), config, names))


def test_layers_that_the_config_does_not_announce_are_refused(source: Path) -> None:
    set_field(source, "num_nextn_predict_layers", 0)
    with pytest.raises(UserError, match=r"has the tensor model\.layers\.2\..*, unknown to qwen3 \(3 in total\)"):
        engine_of(source)


def test_a_critic_and_a_random_model_carry_nothing(source: Path, tmp_path: Path) -> None:
    critic = MegatronEngine(EngineConfig(path=str(source), value_head_std=0.2), scalar=True)
    critic.initialize()
    critic.save(tmp_path / "critic")
    assert not set(MTP) & set(load_file(tmp_path / "critic" / "model.safetensors"))
    (source / "model.safetensors").unlink()
    engine_of(source, init="random").save(tmp_path / "random")
    assert "model.norm.weight" in load_file(tmp_path / "random" / "model.safetensors")
