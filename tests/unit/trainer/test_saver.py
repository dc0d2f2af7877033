"""Checkpoints of a run, with a real engine in one process."""

from __future__ import annotations

import random
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.actor.checkpoint import engine_state
from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.supervised import MegatronLMEngine
from megarl.config import SaverConfig
from megarl.knobs import UserError
from megarl.parallel import groups
from megarl.trainer.checkpoints import manifest, rng_state, trainer_state
from megarl.trainer.checkpoints import saver as saver_module
from megarl.trainer.checkpoints.saver import ACTOR, CheckpointError, Saver
from megarl.types import PackedBatch, cu_seqlens_of

FILES = (
    "manifest.json", "trainer.json", "trainer.safetensors", "generators/rank_00000.json", "actor/engine.json",
    "actor/index.json", "actor/rank_00000.safetensors", "actor/hf/config.json", "actor/hf/generation_config.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(checkpoints: Callable[..., Path]) -> Iterator[MegatronLMEngine]:
    config = EngineConfig(path=str(checkpoints("qwen3", tied=True)), optimizer=OptimizerConfig(lr=1e-2))
    engine = MegatronLMEngine(config)
    engine.initialize()
    yield engine
    groups.destroy()


def train(engine: MegatronLMEngine) -> float:
    ids = torch.arange(40) * 7 % 343
    mask = torch.ones(40, dtype=torch.bool)
    return engine.train_lm(PackedBatch(cu_seqlens_of(torch.tensor([25, 15])), {"input_ids": ids, "loss_mask": mask}))[
        "loss"
    ]


def weights(engine: MegatronLMEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def saver_of(folder: Path, notes: list[str] | None = None, **knobs: Any) -> Saver:
    folder.mkdir(exist_ok=True)
    return Saver(SaverConfig(**{"asynchronous": False, **knobs}), folder, (notes if notes is not None else []).append)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@contextmanager
def full_disk() -> Iterator[None]:
    """Limits files to 64 KB: writes fail as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Rank files are written only after this event is set."""
    released, write = threading.Event(), engine_state.save_file

    def wait_and_write(*args: Any) -> None:
        assert released.wait(300)
        write(*args)

    monkeypatch.setattr(engine_state, "save_file", wait_and_write)
    return released


def test_only_the_newest_checkpoints_are_kept_and_the_last_is_restored(
    engine: MegatronLMEngine, tmp_path: Path
) -> None:
    notes: list[str] = []
    saver = saver_of(tmp_path / "c", notes, keep=2)
    seen = []
    for step in (5, 10, 15):
        train(engine)
        saver.save({ACTOR: engine}, step, {"facts": {"a": step}})
        seen.append(weights(engine))
    assert names(tmp_path / "c") == ["step_000010", "step_000015"]
    assert notes[-1].startswith(f"checkpoint of step 15 in {tmp_path / 'c' / 'step_000015'} (1.5 MB, ")
    train(engine)
    assert saver.restore({ACTOR: engine}) == {"step": 15, "facts": {"a": 15}}
    assert saver.saved == 15
    assert same(weights(engine), seen[-1])
    (tmp_path / "c" / "step_000015").rename(tmp_path / "c" / "step_000001")  # what counts is what is in it
    assert saver.restore({ACTOR: engine})["step"] == 15
    assert not same(seen[0], seen[1])


def test_a_damaged_newer_checkpoint_does_not_count_as_kept(engine: MegatronLMEngine, tmp_path: Path) -> None:
    saver = saver_of(tmp_path / "c", keep=2)
    for step in (5, 10):
        saver.save({ACTOR: engine}, step, {})
    (tmp_path / "c" / "step_000010" / "trainer.json").write_text("{}")
    resumed = saver_of(tmp_path / "c", keep=1)
    assert resumed.restore({ACTOR: engine})["step"] == 5
    resumed.save({ACTOR: engine}, 7, {})
    assert names(tmp_path / "c") == ["step_000007", "step_000010"]
    assert resumed.restore({ACTOR: engine})["step"] == 7


def test_a_damaged_checkpoint_that_a_run_has_passed_again_does_not_count_as_kept(
    engine: MegatronLMEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    saver = saver_of(folder, keep=2)
    for step in (10, 12):
        saver.save({ACTOR: engine}, step, {})
    (folder / "step_000012" / "trainer.json").write_text("{}")
    resumed = saver_of(folder, keep=2)
    assert resumed.restore({ACTOR: engine})["step"] == 10
    resumed.save({ACTOR: engine}, 15, {})
    (folder / "step_000015" / "trainer.json").write_text("{}")
    assert saver_of(folder).restore({ACTOR: engine})["step"] == 10
    resumed.save({ACTOR: engine}, 20, {})
    assert names(folder) == ["step_000015", "step_000020"]


@pytest.fixture(scope="module")
def two(engine: MegatronLMEngine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """Checkpoints of steps 1 and 2, and the weights and the next loss after each."""
    folder = tmp_path_factory.mktemp("two")
    saver, expected = saver_of(folder), {}
    for step in (1, 2):
        train(engine)
        saver.save({ACTOR: engine}, step, {"parts": {"buffer": {"tokens": torch.arange(step)}}})
        expected[step] = weights(engine)
    found = sorted(str(p.relative_to(folder / "step_000002")) for p in (folder / "step_000002").rglob("*.*"))
    assert found == sorted(FILES), "a file that no case below damages"
    return folder, expected


@pytest.mark.parametrize("damage", ["truncated", "first bit", "middle bit", "last bit", "missing", "empty"])
@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_file_is_noticed_and_the_step_before_is_used(
    name: str, damage: str, two: tuple[Path, dict[int, Any]], engine: MegatronLMEngine, tmp_path: Path
) -> None:
    shutil.copytree(two[0], tmp_path / "c")
    path = tmp_path / "c" / "step_000002" / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage in ("truncated", "empty"):
        path.write_bytes(content[: len(content) - 1 if damage == "truncated" else 0])
    else:
        content[{"first": 0, "middle": len(content) // 2, "last": -1}[damage.split()[0]]] ^= 1
        path.write_bytes(content)
    notes: list[str] = []
    restored = saver_of(tmp_path / "c", notes).restore({ACTOR: engine})
    assert restored["step"] == 1
    assert same(weights(engine), two[1][1])
    assert len(notes) == 1
    assert notes[0].startswith(f"checkpoint {tmp_path / 'c' / 'step_000002'} is damaged ({name}")
    assert notes[0].endswith("looking at the one before")
    if damage in ("truncated", "empty") and name != manifest.NAME:  # before it is hashed
        assert f"{name} has {path.stat().st_size} bytes, written were {len(content)}" in notes[0]


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(
    two: tuple[Path, dict[int, Any]], engine: MegatronLMEngine, tmp_path: Path
) -> None:
    shutil.copytree(two[0], tmp_path / "c")
    for step in (1, 2):
        (tmp_path / "c" / f"step_00000{step}" / "trainer.json").write_text("{}")
    with pytest.raises(UserError, match="holds no whole checkpoint"):
        saver_of(tmp_path / "c").restore({ACTOR: engine})


def poll_for_ever(saver: Saver) -> None:
    """Polls as a run does at the end of each step."""
    while True:
        saver.poll()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_raised_and_leaves_nothing_behind(
    asynchronous: bool, engine: MegatronLMEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    saver = saver_of(folder, asynchronous=asynchronous)
    saver.save({ACTOR: engine}, 5, {})
    saver.finish()
    message = r"step 10 could not be written; rank 0: .*(os error|Errno)"
    with full_disk():
        if asynchronous:
            saver.save({ACTOR: engine}, 10, {})
            with pytest.raises(CheckpointError, match=message):
                poll_for_ever(saver)
        else:
            with pytest.raises(CheckpointError, match=message):
                saver.save({ACTOR: engine}, 10, {})
    assert names(folder) == ["step_000005"]
    saver.save({ACTOR: engine}, 15, {})
    saver.finish()
    assert names(folder) == ["step_000005", "step_000015"]


def test_a_folder_that_cannot_be_written_is_raised(engine: MegatronLMEngine, tmp_path: Path) -> None:
    saver = saver_of(tmp_path / "c")
    (tmp_path / "c").rmdir()
    (tmp_path / "c").write_text("a file, where the folder should be")
    with pytest.raises(CheckpointError, match=r"step 5 could not be written; rank 0: .*Not a directory"):
        saver.save({ACTOR: engine}, 5, {})


def test_training_goes_on_while_a_checkpoint_is_written(
    engine: MegatronLMEngine, tmp_path: Path, held: threading.Event
) -> None:
    saver = saver_of(tmp_path / "c", asynchronous=True)
    state_of_data = {"position": [3], "buffer": torch.ones(2)}
    before = weights(engine)
    saver.save({ACTOR: engine}, 5, {"parts": state_of_data})
    expected = train(engine)
    state_of_data["position"].append(4)
    state_of_data["buffer"].zero_()
    saver.poll()
    assert names(tmp_path / "c") == ["step_000005.writing"], "it was not to be written yet"
    held.set()
    saver.finish()
    assert names(tmp_path / "c") == ["step_000005"]
    restored = saver.restore({ACTOR: engine})
    assert restored["parts"]["position"] == [3]
    assert torch.equal(restored["parts"]["buffer"], torch.ones(2))
    assert same(weights(engine), before)
    assert train(engine) == expected


def test_a_second_checkpoint_waits_for_the_first(
    engine: MegatronLMEngine, tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[int] = []
    write = saver_module._Write._run

    def counted(self: Any) -> None:
        at_once.append(sum(t.name.startswith("checkpoint-") for t in threading.enumerate()))
        write(self)

    monkeypatch.setattr(saver_module._Write, "_run", counted)
    saver = saver_of(tmp_path / "c", asynchronous=True)
    saver.save({ACTOR: engine}, 5, {})
    threading.Timer(0.2, held.set).start()
    saver.save({ACTOR: engine}, 10, {})
    assert (tmp_path / "c" / "step_000005").is_dir()
    saver.finish()
    assert names(tmp_path / "c") == ["step_000005", "step_000010"]
    assert at_once == [1, 1]


def test_a_write_that_does_not_end_is_raised(engine: MegatronLMEngine, tmp_path: Path, held: threading.Event) -> None:
    saver = saver_of(tmp_path / "c", timeout_s=0.05)
    with pytest.raises(CheckpointError, match=r"not written within saver.timeout_s=0\.05 seconds"):
        saver.save({ACTOR: engine}, 5, {})
    held.set()


def test_what_killed_runs_left_is_removed(engine: MegatronLMEngine, tmp_path: Path) -> None:
    saver = saver_of(tmp_path / "c")
    for left in ("step_000003.writing", "step_000002.removing"):
        (tmp_path / "c" / left / "actor").mkdir(parents=True)
    with pytest.raises(UserError, match="holds no whole checkpoint"):
        saver.restore({ACTOR: engine})
    saver.save({ACTOR: engine}, 5, {})
    assert names(tmp_path / "c") == ["step_000005"]


def test_a_folder_that_cannot_be_removed_is_left_for_the_next_checkpoint(
    engine: MegatronLMEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NFS, where another process still reads an old checkpoint."""
    notes: list[str] = []
    saver = saver_of(tmp_path / "c", notes, keep=1)

    def busy(folder: Path) -> None:
        raise OSError(39, "Directory not empty", str(folder))

    saver.save({ACTOR: engine}, 5, {})
    with monkeypatch.context() as patched:
        patched.setattr(saver_module.shutil, "rmtree", busy)
        for step in (6, 7):
            saver.save({ACTOR: engine}, step, {})
    assert names(tmp_path / "c") == ["step_000005.removing", "step_000006.removing", "step_000007"]
    assert f"{tmp_path}/c/step_000005.removing could not be removed ([Errno 39] Directory not empty" in notes[1]
    shutil.copytree(tmp_path / "c" / "step_000007", tmp_path / "c" / "step_000005")
    saver._remove(tmp_path / "c" / "step_000005")  # beside what is left of the first
    assert saver.restore({ACTOR: engine})["step"] == 7
    saver.save({ACTOR: engine}, 8, {})
    assert names(tmp_path / "c") == ["step_000008"]


@pytest.mark.parametrize(("every", "due"), [(0, []), (3, [3, 6]), (1, [1, 2, 3, 4, 5, 6])])
def test_checkpoints_are_due_every_so_many_steps(tmp_path: Path, every: int, due: list[int]) -> None:
    saver = saver_of(tmp_path, every_steps=every)
    assert [step for step in range(1, 7) if saver.due(step)] == due


@pytest.mark.parametrize("knobs", [{"every_steps": -1}, {"keep": 0}, {"timeout_s": 0.0}])
def test_a_wrong_knob_is_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"saver.{next(iter(knobs))}="):
        SaverConfig(**knobs)


def draw() -> list[Any]:
    return [torch.randn(3).tolist(), np.random.randn(), np.random.rand(2).tolist(), random.random(), random.gauss(0, 1)]


def test_generators_go_on_where_they_stood_and_a_new_rank_has_its_own() -> None:
    draw()  # an odd number of normal ones: the second of the pair is kept by the generator
    kept = rng_state.state()
    expected = draw()
    draw()
    rng_state.restore(kept)
    assert draw() == expected
    seen = []
    for rank in (1, 2, 1):
        rng_state.derive(kept, rank)
        seen.append(draw())
    assert seen[0] == seen[2]
    assert len({str(values) for values in (expected, *seen)}) == 3


def test_damage_that_another_rank_reports_counts(
    two: tuple[Path, dict[int, Any]], engine: MegatronLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted report stands for the other rank's; test_saver_ranks.py has two real ranks."""
    reports = iter(["a file of its share is damaged", None])

    def with_another_rank(value: Any) -> list[Any]:
        return [value] if isinstance(value, bool) else [value, next(reports)]

    monkeypatch.setattr(saver_module, "gather_json", with_another_rank)
    assert saver_of(two[0]).restore({ACTOR: engine})["step"] == 1


def test_a_resumed_run_draws_what_the_saved_one_drew_next(engine: MegatronLMEngine, tmp_path: Path) -> None:
    saver = saver_of(tmp_path / "c")
    draw()
    saver.save({ACTOR: engine}, 1, {})
    expected = draw()
    assert draw() != expected
    saver_of(tmp_path / "c").restore({ACTOR: engine})
    assert draw() == expected


def test_a_damaged_checkpoint_is_replaced_when_the_run_comes_to_its_step_again(
    two: tuple[Path, dict[int, Any]], engine: MegatronLMEngine, tmp_path: Path
) -> None:
    shutil.copytree(two[0], tmp_path / "c")
    (tmp_path / "c" / "step_000002" / "trainer.json").write_text("{}")
    saver = saver_of(tmp_path / "c", keep=2)
    assert saver.restore({ACTOR: engine})["step"] == 1
    train(engine)
    saver.save({ACTOR: engine}, 2, {"again": True})
    assert names(tmp_path / "c") == ["step_000001", "step_000002"]
    assert saver_of(tmp_path / "c").restore({ACTOR: engine}) == {"step": 2, "again": True}
    saver.save({ACTOR: engine}, 3, {})
    assert names(tmp_path / "c") == ["step_000002", "step_000003"], "it counts as kept again"


def test_a_part_may_hold_tensors_at_any_depth(tmp_path: Path) -> None:
    kept = {
        "buffer": [{"tokens": torch.arange(3), "version": 7}, None],
        "mean": torch.tensor(0.5, dtype=torch.bfloat16),
    }
    trainer_state.write(tmp_path, *trainer_state.freeze(kept))
    found = trainer_state.read(tmp_path)
    assert torch.equal(found["buffer"][0]["tokens"], torch.arange(3))
    assert found["buffer"][0]["version"] == 7
    assert found["buffer"][1] is None
    assert found["mean"].dtype == torch.bfloat16


def test_a_manifest_of_a_newer_megarl_is_told_from_a_damaged_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 3)
    manifest.seal(tmp_path, 5, {})
    monkeypatch.undo()
    with pytest.raises(UserError, match="format 3, this megarl reads up to 2"):
        manifest.read(tmp_path)
    (tmp_path / manifest.NAME).write_text((tmp_path / manifest.NAME).read_text().replace("5", "6", 1))
    with pytest.raises(manifest.Damaged, match="SHA-256 differs"):
        manifest.read(tmp_path)
