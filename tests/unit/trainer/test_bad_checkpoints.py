"""A run that cannot be resumed says why in one line, before anything is started."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import AutoTokenizer

from megarl import cli
from megarl.actor.checkpoint.stored_state import FACTS
from megarl.actor.config import EngineConfig
from megarl.actor.supervised import MegatronLMEngine
from megarl.config import SaverConfig
from megarl.knobs import UserError
from megarl.parallel import groups
from megarl.trainer.checkpoints import manifest
from megarl.trainer.checkpoints.saver import ACTOR, Saver
from megarl.trainer.inputs import read_inputs

MODEL: dict[str, Any] = {"family": "qwen3", "tied": True, "vocab_size": 353}


@pytest.fixture(scope="module")
def run(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint, of step 5."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text("{}")
    (folder / "checkpoints").mkdir()
    engine = MegatronLMEngine(EngineConfig(path=str(checkpoints(**MODEL))))
    engine.initialize()
    Saver(SaverConfig(asynchronous=False), folder / "checkpoints", print).save({ACTOR: engine}, 5, {})
    groups.destroy()
    return folder


def sealed_again(step: Path) -> None:
    """Renews the manifest after a change."""
    files = [p for p in step.rglob("*") if p.is_file() and p.name != manifest.NAME]
    manifest.seal(step, 5, manifest.describe(step, files))


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def newer_manifest(step: Path) -> None:
    body = json.loads((step / manifest.NAME).read_text())
    del body["sha256"]
    (step / manifest.NAME).write_text(manifest._text({**body, "format": 9}))


def newer_state(step: Path) -> None:
    rewrite(step / ACTOR / FACTS, format=9)
    sealed_again(step)


def without_actor(step: Path) -> None:
    (step / ACTOR).rename(step / "critic")
    sealed_again(step)


def of_an_older_megarl(step: Path) -> None:
    for path in (step / ACTOR).glob("*.*"):
        path.rename(step / path.name)
    (step / manifest.NAME).unlink()


def file_in_place(step: Path) -> None:
    shutil.rmtree(step)
    step.write_text("a file")


Change = Callable[[Path], Any]
DAMAGED: list[tuple[str, Change, str]] = [
    ("no folder", lambda step: shutil.rmtree(step.parents[1]), "is not a folder"),
    ("no run", lambda step: (step.parents[1] / "config.yaml").unlink(), r"is not a run: it has no config\.yaml"),
    ("no checkpoints", lambda step: shutil.rmtree(step.parent), "is not a run: it has no checkpoints/"),
    ("no checkpoint", lambda step: shutil.rmtree(step), r"no whole checkpoint \(there is none\)"),
    ("half written", lambda step: step.rename(step.with_suffix(".writing")), r"no whole checkpoint \(there is none\)"),
    ("a file in its place", file_in_place, r"no whole checkpoint \(there is none\)"),
    ("an empty folder", lambda s: (shutil.rmtree(s), s.mkdir()), r"step_000005: manifest\.json is missing"),
    ("no manifest", lambda s: (s / manifest.NAME).unlink(), r"manifest\.json is missing"),
    ("an empty manifest", lambda s: (s / manifest.NAME).write_text(""), r"manifest\.json cannot be read"),
    ("a manifest that is no JSON", lambda s: (s / manifest.NAME).write_bytes(b"\xff{"), r"manifest\.json cannot be"),
    ("a list for a manifest", lambda s: (s / manifest.NAME).write_text("[]"), r"manifest\.json cannot be read"),
    ("an edited manifest", lambda s: rewrite(s / manifest.NAME, step=6), r"manifest\.json is not what was written"),
    ("a newer manifest", newer_manifest, "format 9, this megarl reads up to 2"),
    ("a newer state", newer_state, "format 9, this megarl reads up to 2"),
    ("of an older megarl", of_an_older_megarl, r"manifest\.json is missing"),
    ("without an actor", without_actor, "holds no state of an engine"),
    ("a missing file", lambda s: (s / ACTOR / "rank_00000.safetensors").unlink(), "safetensors is missing"),
    ("a short file", lambda s: (s / "trainer.json").write_text("{"), r"trainer\.json has 1 bytes, written were"),
]  # fmt: skip
OTHER_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"family": "llama"}, "is of a qwen3 model with model_type=qwen3, this run's has model_type=llama"),
    ({"hidden_size": 128}, "hidden_size=64, this run's has hidden_size=128"),
    ({"num_hidden_layers": 4}, "num_hidden_layers=2, this run's has num_hidden_layers=4"),
    ({"vocab_size": 360}, "vocab_size=353, this run's has vocab_size=360"),
    ({"tied": False}, "tie_word_embeddings=True, this run's has tie_word_embeddings=False"),
    ({"num_key_value_heads": 4}, "num_key_value_heads=2, this run's has num_key_value_heads=4"),
]  # fmt: skip


@pytest.fixture
def refused(
    run: Path, checkpoints: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """The error line for a changed copy of the run. Joining a process group fails the test."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a process group is made")

    def line(change: Change = lambda step: None, model: dict[str, Any] | None = None, **knobs: Any) -> str:
        shutil.copytree(run, tmp_path / "run")
        change(tmp_path / "run" / "checkpoints" / "step_000005")
        folder = tmp_path / "model"
        shutil.copytree(checkpoints(**{**MODEL, **(model or {})}), folder)
        AutoTokenizer.from_pretrained(cli.ASSETS / "tiny").save_pretrained(folder)
        overrides = [f"{name}={value}" for name, value in knobs.items()]
        config = cli.load(["+experiment=gsm8k_sft", f"resume={tmp_path / 'run'}", f"actor.path={folder}", *overrides])
        monkeypatch.setattr(dist, "init_process_group", never)
        with pytest.raises(UserError) as error:
            read_inputs(config, rank=0)
        assert "\n" not in str(error.value)
        return str(error.value)

    return line


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in DAMAGED], ids=[case[0] for case in DAMAGED])
def test_a_checkpoint_that_cannot_be_used_is_refused(change: Change, message: str, refused: Callable[..., str]) -> None:
    assert re.search(message, refused(change))


@pytest.mark.parametrize(("model", "message"), OTHER_MODELS)
def test_a_checkpoint_of_another_model_is_refused(
    model: dict[str, Any], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(model=model)


def test_a_checkpoint_of_another_dtype_is_refused(refused: Callable[..., str]) -> None:
    assert "has actor.dtype=float32, this run bfloat16; resume with float32" in refused(**{"actor.dtype": "bfloat16"})


def test_an_older_checkpoint_serves_where_the_newest_is_visibly_damaged(
    run: Path, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_000010").mkdir()
    folder = tmp_path / "model"
    shutil.copytree(checkpoints(**MODEL), folder)
    AutoTokenizer.from_pretrained(cli.ASSETS / "tiny").save_pretrained(folder)
    read_inputs(cli.load(["+experiment=gsm8k_sft", f"resume={tmp_path / 'run'}", f"actor.path={folder}"]), rank=0)


@pytest.mark.long
def test_the_command_refuses_in_one_line(run: Path) -> None:
    command = [sys.executable, "-m", "megarl.train", "+experiment=gsm8k_sft", f"resume={run}", "actor.dtype=bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        f"megarl: {run}/checkpoints/step_000005/actor has actor.dtype=float32, this run bfloat16"
    )
