"""A damaged newest checkpoint never blocks a resume: every damage of every file falls back to the one before."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megarl import cli
from megarl.actor.config import EngineConfig
from megarl.actor.supervised import MegatronLMEngine
from megarl.config import SaverConfig
from megarl.knobs import UserError
from megarl.parallel import groups
from megarl.trainer.checkpoints import manifest
from megarl.trainer.checkpoints.saver import ACTOR, Saver, check_resumable
from tests.fuzzing import fuzzed

OLDER, NEWEST = 5, 10
FILES = (
    "manifest.json",
    "trainer.json",
    "trainer.safetensors",
    "generators/rank_00000.json",
    "actor/engine.json",
    "actor/index.json",
    "actor/rank_00000.safetensors",
    "actor/hf/config.json",
    "actor/hf/tokenizer.json",
)


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0x04
    path.write_bytes(content)


def replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a byte long": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "first byte changed": lambda path: flip(path, 0.0),
    "a byte in the middle changed": lambda path: flip(path, 0.5),
    "last byte changed": lambda path: flip(path, 1.0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "no text": lambda path: path.write_bytes(b"\xff" * path.stat().st_size),
    "another JSON value of its size": lambda path: path.write_text("[" + " " * (path.stat().st_size - 2) + "]"),
    "an empty JSON object of its size": lambda path: path.write_text("{" + " " * (path.stat().st_size - 2) + "}"),
    "JSON too deep to parse": lambda path: path.write_text("[" * max(path.stat().st_size, 10**6)),
    "a folder in its place": lambda path: replace(path, Path.mkdir),
    "a link to nothing": lambda path: replace(path, lambda p: p.symlink_to("nowhere")),
    "a link to itself": lambda path: replace(path, lambda p: p.symlink_to(p.name)),
    "a pipe in its place": lambda path: replace(path, os.mkfifo),
}
FOLDER_DAMAGES: dict[str, Callable[[Path], Any]] = {
    "everything deleted": lambda step: (shutil.rmtree(step), step.mkdir()),
    "the actor's folder deleted": lambda step: shutil.rmtree(step / ACTOR),
    "a file for the actor's folder": lambda step: (shutil.rmtree(step / ACTOR), (step / ACTOR).write_text("")),
    "the older one's manifest": lambda step: shutil.copy(
        step.with_name(f"step_{OLDER:06d}") / manifest.NAME, step / manifest.NAME
    ),
    "the older one's weights": lambda step: shutil.copy(
        step.with_name(f"step_{OLDER:06d}") / ACTOR / "rank_00000.safetensors", step / ACTOR
    ),
}


@pytest.fixture(scope="module")
def engine(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronLMEngine]:
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(checkpoints("qwen3", tied=True, vocab_size=353), source, dirs_exist_ok=True)
    AutoTokenizer.from_pretrained(cli.ASSETS / "tiny").save_pretrained(source)
    engine = MegatronLMEngine(EngineConfig(path=str(source)))
    engine.initialize()
    yield engine
    engine.destroy()
    groups.destroy()


def fill(engine: MegatronLMEngine, value: float) -> None:
    for shard in engine.shards():
        shard.view.data.fill_(value)


@pytest.fixture(scope="module")
def whole(engine: MegatronLMEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run, of two steps; every weight is the step's number."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    folder.mkdir()
    saver = Saver(SaverConfig(asynchronous=False), folder, print)
    for step in (OLDER, NEWEST):
        fill(engine, step)
        saver.save({ACTOR: engine}, step, {"position": torch.arange(step)})
    return folder


@pytest.fixture
def resumed(whole: Path, engine: MegatronLMEngine, tmp_path: Path) -> Callable[[Callable[[Path], Any]], dict[str, Any]]:
    """Resumes a copy of the run after a change of its newest checkpoint; checks that state and weights agree."""

    def resume(change: Callable[[Path], Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=tmp_path) as run:
            checkpoints = Path(shutil.copytree(whole, Path(run, "checkpoints")))
            change(checkpoints / f"step_{NEWEST:06d}")
            fill(engine, -1.0)
            check_resumable(Path(run), engine.hf_config, engine.config)
            state = Saver(SaverConfig(), checkpoints, print).restore({ACTOR: engine})
        assert len(state["position"]) == state["step"]
        assert all((shard.view == state["step"]).all() for shard in engine.shards())
        return state

    return resume


def test_the_table_names_every_file(whole: Path) -> None:
    step = whole / f"step_{NEWEST:06d}"
    written = {str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()}
    assert set(FILES) <= written
    assert {str(Path(name).parent) for name in written} == {str(Path(name).parent) for name in FILES}


def test_a_whole_one_is_taken(resumed: Callable[..., dict[str, Any]]) -> None:
    assert resumed(lambda step: None)["step"] == NEWEST


@pytest.mark.parametrize(("name", "damage"), list(itertools.product(FILES, DAMAGES)))
def test_a_damaged_file_falls_back(name: str, damage: str, resumed: Callable[..., dict[str, Any]]) -> None:
    assert resumed(lambda step: DAMAGES[damage](step / name))["step"] == OLDER


@pytest.mark.parametrize("damage", FOLDER_DAMAGES)
def test_a_damaged_folder_falls_back(damage: str, resumed: Callable[..., dict[str, Any]]) -> None:
    assert resumed(FOLDER_DAMAGES[damage])["step"] == OLDER


@pytest.mark.parametrize("method", ["open", "stat"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_the_disk_does_not_give_falls_back(
    name: str, method: str, resumed: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`EIO` of a bad disk, or a folder without rights: the file cannot be opened, or not even looked at."""
    given = getattr(Path, method)

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(f"step_{NEWEST:06d}/{name}"):
            raise OSError(5, "Input/output error", str(path))
        return given(path, *args, **kwargs)

    def change(step: Path) -> None:
        monkeypatch.setattr(Path, method, refuse)

    assert resumed(change)["step"] == OLDER


STEPS = (f"step_{OLDER:06d}", f"step_{NEWEST:06d}")


@st.composite
def accidents(draw: st.DrawFn) -> list[tuple[str, Path, Path, float, int]]:
    """Up to four accidents: their kind, a file of either checkpoint, another file, a place within it, and a byte.

    Half of the cases are one accident that keeps all sizes, which only the content shows.
    """
    files = st.builds(Path, st.sampled_from((*STEPS, STEPS[1])), st.sampled_from(FILES))
    rest = (files, files, st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)), st.integers(0, 255))
    if draw(st.booleans()):
        return [draw(st.tuples(st.just("change"), *rest))]
    kinds = st.sampled_from(["change", "cut", "extend", "empty", "delete", "swap", "copy", "swap steps"])
    return draw(st.lists(st.tuples(kinds, *rest), max_size=4))


def happen(folder: Path, kind: str, name: Path, other: Path, place: float, byte: int) -> None:
    """Lets an accident happen to a file. One to a file that an earlier accident deleted does nothing."""
    path, source = folder / name, folder / other
    if not path.is_file() or not source.is_file():
        return
    content, also = path.read_bytes(), source.read_bytes()
    at = int(place * max(len(content) - 1, 0))
    if kind == "delete":
        path.unlink()
    elif kind == "swap":
        path.write_bytes(also)
        source.write_bytes(content)
    elif kind == "swap steps":
        for step, new in ((STEPS[0], "between"), (STEPS[1], STEPS[0]), ("between", STEPS[1])):
            (folder / step).rename(folder / new)
    else:
        byte_here = bytes([byte])
        results = {
            "change": content[:at] + byte_here + content[at + 1 :],
            "cut": content[:at],
            "extend": content[:at] + byte_here + content[at:],
            "empty": b"",
            "copy": also,
        }
        path.write_bytes(results[kind])


def contents(step: Path) -> dict[str, bytes]:
    return {str(path.relative_to(step)): path.read_bytes() for path in step.rglob("*") if path.is_file()}


@fuzzed(bounded=150, long=5_000)
def test_random_damage_of_both_gives_the_newest_whole_one_or_a_refusal(
    effort: Any, whole: Path, resumed: Callable[..., dict[str, Any]]
) -> None:
    originals = {number: contents(whole / step) for number, step in zip((OLDER, NEWEST), STEPS, strict=True)}

    @effort
    @given(accidents())
    def holds(cases: list[tuple[str, Path, Path, float, int]]) -> None:
        intact: list[int] = []

        def change(newest: Path) -> None:
            for case in cases:
                happen(newest.parent, *case)
            present = [contents(newest.with_name(step)) for step in STEPS]
            intact.extend(number for number, original in originals.items() if original in present)

        try:
            step = resumed(change)["step"]
        except UserError as error:
            message = str(error)
        else:
            assert step == max(intact)
            return
        assert not intact
        assert len(message.splitlines()) == 1

    holds()
