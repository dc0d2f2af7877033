"""Saved HF checkpoints hold what was trained and all that their source holds; damaged ones are refused by file name."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.weights import hf_files, saved_file
from megarl.knobs import UserError
from megarl.parallel import groups

INDEX = "model.safetensors.index.json"
CARRIED = {  # files of a source beside its config and weights
    "tokenizer.json": "{}",
    "added_tokens.json": "{}",
    "sentencepiece.bpe.model": "pieces",
    "README.md": "a model card",
    "generation_config.json": "{}",
    "additional_chat_templates/tool_use.jinja": "{{ messages }}",
    "tokenizer_v2/vocab.txt": "words",
    "original/params.json": "{}",
    "1_Pooling/config.json": "{}",
}
LEFT = {  # weights, hidden files, and models of their own
    "pytorch_model.bin": "old weights",
    "pytorch_model.bin.index.json": "{}",
    "original/consolidated.00.pth": "weights",
    "model.gguf": "weights",
    ".git/config": "",
    ".gitattributes": "",
    "checkpoint-500/config.json": "{}",
    "checkpoint-500/model.safetensors": "weights",
    "checkpoint-500/trainer_state.json": "{}",
}


@pytest.fixture
def source(checkpoints: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a model's folder, to be changed."""
    return shutil.copytree(checkpoints("qwen3", tied=True, vocab_size=341), tmp_path / "source")


@pytest.fixture
def engine_of() -> Iterator[Callable[..., MegatronEngine]]:
    def build(path: Path, **knobs: Any) -> MegatronEngine:
        engine = MegatronEngine(EngineConfig(path=str(path), **knobs), trainable=False)
        engine.initialize()
        return engine

    yield build
    groups.destroy()


def lay_out(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def scale(engine: MegatronEngine, factor: float) -> dict[str, torch.Tensor]:
    """Multiplies all weights, and returns them by HF name."""
    with torch.no_grad():
        for param in engine.modules[0].parameters():
            param.mul_(factor)
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors that transformers reads from `folder`."""
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_equal(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert tensors[name].dtype is tensor.dtype
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_saved_config_names_the_dtype_of_the_saved_tensors(
    dtype: str, stored: str, source: Path, engine_of: Callable[..., MegatronEngine], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, stored)).save_pretrained(source)
    assert json.loads((source / "config.json").read_text())["dtype"] == stored
    engine = engine_of(source, dtype=dtype)
    trained = scale(engine, 1.1)
    engine.save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    assert_equal(loaded(tmp_path / "out"), trained)
    assert str(engine.hf_config.dtype).endswith(stored)  # the engine's own config is not changed


def test_everything_that_is_no_weight_is_carried(
    source: Path, engine_of: Callable[..., MegatronEngine], tmp_path: Path
) -> None:
    lay_out(source, CARRIED | LEFT)
    (source / "broken_link").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    (source / "tokenizer_empty").mkdir()
    engine_of(source).save(tmp_path / "out")
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert written == {"config.json", "model.safetensors", *CARRIED}
    assert all((tmp_path / "out" / name).read_text() == text for name, text in CARRIED.items())


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("before", ["several files", "one file", "another model", "pytorch files"])
def test_a_save_over_other_weights_is_what_is_read_back(
    before: str,
    many: bool,
    source: Path,
    engine_of: Callable[..., MegatronEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(source)
    if before == "pytorch files":
        lay_out(out, {"pytorch_model.bin": "old", "pytorch_model.bin.index.json": "{}"})
    elif before == "another model":
        shutil.copytree(source, out)
        save_file({"foreign": torch.ones(1)}, out / "model-00001-of-00002.safetensors")
    else:
        model.save_pretrained(out, max_shard_size="50KB" if before == "several files" else "5GB")
    lay_out(out, {"notes.txt": "kept"})
    engine = engine_of(source)
    trained = scale(engine, 1.5)
    if many:
        monkeypatch.setattr(hf_files, "MAX_FILE_BYTES", 60_000)
    engine.save(out)
    assert (out / INDEX).is_file() == many
    assert (out / "notes.txt").read_text() == "kept"
    assert not (out / ".writing").exists()
    assert not list(out.glob("pytorch_model*"))
    assert_equal(loaded(out), trained)
    scale(engine, 7.0)
    engine.load(out)
    assert_equal(dict(engine.named_weights()), trained)


def test_a_save_onto_the_source_works(source: Path, engine_of: Callable[..., MegatronEngine]) -> None:
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(source, max_shard_size="50KB")
    (source / "model.safetensors").unlink()
    lay_out(source, CARRIED | LEFT)
    engine = engine_of(source)
    for factor in (1.5, 1.25):
        trained = scale(engine, factor)
        engine.save(source)
        assert_equal(loaded(source), trained)
    assert all((source / name).read_text() == text for name, text in CARRIED.items())
    assert (source / ".git" / "config").is_file()


def test_a_save_into_the_source_does_not_copy_itself(source: Path, engine_of: Callable[..., MegatronEngine]) -> None:
    lay_out(source, CARRIED)
    engine_of(source).save(source / "trained" / "here")
    assert not (source / "trained" / "here" / "trained").exists()


@pytest.mark.parametrize("fails_at", [1, 2, 4, 8])
def test_an_interrupted_save_leaves_the_old_weights_or_none(
    fails_at: int,
    source: Path,
    engine_of: Callable[..., MegatronEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk that fills up stands for any interruption: the n-th write or rename fails."""
    out, calls = tmp_path / "out", 0
    monkeypatch.setattr(hf_files, "MAX_FILE_BYTES", 60_000)
    engine = engine_of(source)
    old = dict(engine.named_weights())
    engine.save(out)
    scale(engine, 1.5)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= fails_at:
                raise OSError(28, "No space left on device")
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(saved_file, "save_file", counted(save_file))
        patch.setattr(Path, "replace", counted(Path.replace))
        with pytest.raises(OSError, match="No space"):
            engine.save(out)
    try:
        engine.load(out)
    except UserError as refusal:
        assert re.search(r"holds no|lacks", str(refusal))  # noqa: PT017
    else:
        assert_equal(dict(engine.named_weights()), old)
    trained = scale(engine, 1.1)
    engine.save(out)
    assert_equal(loaded(out), trained)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: os.truncate(path, 5),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff" * 4096),
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    ],
    ids=["half", "header cut", "empty", "garbage", "pointer of git-lfs"],
)
def test_a_damaged_weight_file_is_refused_by_its_name(damage: Callable[[Path], Any], source: Path) -> None:
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(source, max_shard_size="50KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    damaged = sorted(source.glob("*.safetensors"))[1]
    damage(damaged)
    engine = MegatronEngine(EngineConfig(path=str(source)), trainable=False)
    with pytest.raises(UserError, match=rf"{damaged.name} \(\d+ bytes\) is cut off or no safetensors file") as refusal:
        hf_files.Checkpoint(str(source), engine.hf_config)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_refused(text: str, source: Path) -> None:
    (source / INDEX).write_text(text)
    engine = MegatronEngine(EngineConfig(path=str(source)), trainable=False)
    with pytest.raises(UserError, match=r"index\.json is no index of weights|lacks 1") as refusal:
        hf_files.Checkpoint(str(source), engine.hf_config)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("change", ["equal", "a last bit", "another shape"])
def test_a_tied_config_with_a_head_of_its_own_is_refused(
    change: str, source: Path, engine_of: Callable[..., MegatronEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.actor.weights.hf_weights.COMPARED_ROWS", 100)
    tensors = load_file(source / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if change == "a last bit":
        head[-1, -1] = torch.nextafter(head[-1, -1], torch.tensor(9.0))
    save_file({**tensors, "lm_head.weight": head[:-1] if "shape" in change else head}, source / "model.safetensors")
    if change == "equal":
        engine_of(source)
        return
    message = "differs from model.embed_tokens.weight; set tie" if change == "a last bit" else "has shape"
    with pytest.raises(UserError, match=message) as refusal:
        engine_of(source)
    assert "\n" not in str(refusal.value)
