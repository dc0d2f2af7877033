"""`megarl.replay` takes steps of a run again, as a user types it: bit for bit, and on other layouts within rounding."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import cli, compare
from megarl.knobs import UserError
from megarl.observe.run_folder import RunFolder
from megarl.trainer.replay.kept_batches import BatchRing, kept_steps, read_batch
from tests.e2e.test_main_job import DEADLINE_S, Command

pytestmark = pytest.mark.usefixtures("warm_commands")
SFT = [
    "+experiment=gsm8k_sft", "train_dataset.batch_size=4", "total_train_steps=6", "saver.every_steps=4",
    "saver.keep_batches=3", "evaluator.every_steps=0", "saver.export_hf=false", "parallel=dp2",
]  # fmt: skip
GRPO = [
    "+experiment=gsm8k_grpo", "algorithm=dapo", "train_dataset.batch_size=4", "gconfig.n_samples=4",
    "total_train_steps=4", "saver.every_steps=2", "saver.keep_batches=4", "saver.export_hf=false",
    "evaluator.every_steps=0", "evaluator.at_start=false", "evaluator.at_end=false",
]  # fmt: skip


def trained(root: Path, *arguments: str) -> RunFolder:
    command = Command(root, *arguments)
    assert command.wait() == 0, command.output.read_text()[-3000:]
    name = arguments[0].removeprefix("+experiment=")
    return RunFolder((root / name / "latest").resolve())


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("sft"), *SFT)


def replayed(run: RunFolder, root: Path, *arguments: str) -> tuple[int, str]:
    command = Command(root, str(run.path), *arguments, module="megarl.replay")
    return command.wait(), command.output.read_text()


def test_two_ranks_take_the_last_step_again_bit_for_bit_through_the_batch_before_it(
    supervised: RunFolder, tmp_path: Path
) -> None:
    code, text = replayed(supervised, tmp_path, "step=6", f"keep={tmp_path / 'kept'}")
    assert code == 0, text
    assert "from the checkpoint of step 4, on 2 ranks" in text
    assert "bit for bit the run's step: metrics and state after it" in text
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["batch.safetensors", "stats.json"]


@pytest.mark.long
def test_another_layout_takes_the_step_within_rounding_from_the_runs_own_state(
    supervised: RunFolder, tmp_path: Path
) -> None:
    code, text = replayed(supervised, tmp_path, "step=6", "parallel=tp2")
    assert code == 0, text
    assert "the run's step within 1e-05: loss and gradient norm on another layout" in text


@pytest.mark.long
def test_another_batch_is_found_to_differ_and_a_step_without_a_state_is_refused(
    supervised: RunFolder, tmp_path: Path
) -> None:
    code, text = replayed(supervised, tmp_path, "step=4")
    assert code == 2
    assert text.startswith("megarl: step=4: the state before it cannot be had")
    assert text.rstrip().endswith("steps that can be replayed: 5-6")
    path = kept_steps(supervised.batches)[5]
    batch, own = read_batch(path), path.read_bytes()
    batch["input_ids"] = batch["input_ids"].flip(0)
    BatchRing(cli.load(SFT), supervised.batches, print).keep(5, batch)
    code, text = replayed(supervised, tmp_path, "step=5")
    path.write_bytes(own)
    assert code == 1, text
    assert "differs: the loss by" in text


@pytest.mark.long
def test_two_layouts_are_compared_by_layer_on_the_commands_page(supervised: RunFolder, tmp_path: Path) -> None:
    words = ("step=6", "parallel=cp2", "actor.max_tokens_per_mb=64", "sequences=4")  # in several microbatches
    command = Command(tmp_path, str(supervised.path), *words, module="megarl.compare")
    assert command.wait() == 0, command.output.read_text()[-3000:]
    text = command.output.read_text()
    assert "embedding │ 0.0e+00 │ 0.0e+00" in text
    found = re.search(r"they part at layer (\d), by (\S+) at worst", text)
    assert found is not None
    assert 0 < float(found[2]) < 1e-5
    assert "By layer" in (supervised.path / "compare_000006" / "compare.html").read_text("utf-8")
    with pytest.raises(
        UserError, match=r"method=sft has no servers; give against=MODEL, or knobs such as parallel=tp2"
    ):
        compare.compare(compare.parse([str(supervised.path), "step=6"]))
    with pytest.raises(UserError, match=r"actor\.lora\.rank=4: runs of adapters cannot be compared"):
        compare.compare(compare.parse([str(supervised.path), "step=6", "actor.lora.rank=4", "actor.init=checkpoint"]))


@pytest.mark.long
def test_a_resumed_run_replaces_the_batches_of_the_steps_that_it_takes_anew(
    supervised: RunFolder, tmp_path: Path
) -> None:
    run = RunFolder(shutil.copytree(supervised.path, tmp_path / "run"))
    shutil.rmtree(run.checkpoints / "step_000006")  # the run goes back to step 4
    shutil.copyfile(kept_steps(run.batches)[6], run.batches / "step_000009.safetensors")
    command = Command(tmp_path, *SFT, f"resume={run.path}", "total_train_steps=7")
    assert command.wait() == 0, command.output.read_text()[-3000:]
    assert list(kept_steps(run.batches)) == [5, 6, 7]
    code, text = replayed(run, tmp_path, "step=7")
    assert code == 0, text
    assert "from the checkpoint of step 4, on 2 ranks" in text
    assert "bit for bit the run's step: metrics and state after it" in text


@pytest.mark.long
def test_a_step_of_dapo_on_real_rollouts_is_taken_again_bit_for_bit_and_by_another_algorithm(tmp_path: Path) -> None:
    run = trained(tmp_path, *GRPO)
    for step, start in ((1, "the run's start"), (2, "the run's start"), (4, "the checkpoint of step 2")):
        code, text = replayed(run, tmp_path, f"step={step}")
        assert code == 0, text
        assert f"from {start}, on 1 rank" in text
        assert "bit for bit the run's step: metrics" in text
    for layout in ("parallel=dp2", "parallel=pp2", "parallel=tp2_sp", "parallel=cp2"):
        code, text = replayed(run, tmp_path, "step=4", layout)
        assert code == 0, text
        assert "the run's step within 1e-05" in text, layout
    code, text = replayed(run, tmp_path, "step=3", "algorithm=cispo")
    assert code == 0, text
    assert "another step: algorithm=cispo" in text
    words = [sys.executable, "-W", "ignore", "-m", "megarl.compare", str(run.path), "step=4"]  # no run_root: a server
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"nats apart on average, (\S+) at worst", done.stdout)
    assert found is not None
    assert 0 < float(found[1]) < 3e-4, "rounding"
