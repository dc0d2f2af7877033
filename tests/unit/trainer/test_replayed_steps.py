"""A replayed step of a policy and its critic ends in the same bits; what a batch cannot give is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl import cli
from megarl.actor.checkpoint.stored_state import key_of
from megarl.algorithms import algorithm_of
from megarl.config import SaverConfig
from megarl.knobs import UserError
from megarl.observe.run_folder import RunFolder
from megarl.parallel import groups
from megarl.preflight.invariance import batch as random_batch
from megarl.replay import Replayed, parse, verdict
from megarl.trainer import rl
from megarl.trainer.checkpoints.saver import Saver
from megarl.trainer.replay import steps as replayed_steps
from megarl.trainer.replay.checks import changed_knobs, check_replay, overrides_of
from megarl.trainer.replay.kept_batches import BatchRing, read_batch
from megarl.trainer.replay.order import FIGURES, STATS, Order
from megarl.trainer.replay.source import Source, find
from megarl.trainer.replay.steps import replay
from megarl.types import PackedBatch

PPO = [
    "+experiment=gsm8k_grpo",
    "algorithm=ppo",
    "algorithm.kl_coef=0.1",
    "saver.keep_batches=9",
    "deterministic=false",
]
STEPS = 3


def batch_of(step: int) -> PackedBatch:
    """The batch of invariance with ids of the bundled model, other rewards each step, and rollout log-probs."""
    batch = random_batch(prompts=True)
    batch["input_ids"] = batch["input_ids"] % 300
    batch["rewards"] = batch["rewards"].roll(step)
    batch.set_tokens("rollout_logprobs", -2.0 + batch.tokens.pop("noise"))
    return batch


@dataclass(frozen=True)
class Taken:
    """A run of three steps in a folder, with the metrics of each and a checkpoint after each."""

    folder: RunFolder
    stats: dict[int, dict[str, float]]

    def source(self, step: int) -> Source:
        return find(self.folder, step)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taken]:
    torch.set_num_threads(1)
    folder, config = RunFolder(tmp_path_factory.mktemp("run")), cli.load(PPO)
    folder.config.write_text("")
    folder.checkpoints.mkdir()
    models = rl.Models.build(config, algorithm_of(config.algorithm))
    ring = BatchRing(config, folder.batches, print)
    saver = Saver(SaverConfig(asynchronous=False, keep=9), folder.checkpoints, print)
    stats = {}
    for step in range(1, STEPS + 1):
        batch = batch_of(step)
        ring.keep(step, batch)
        models.score(batch)
        models.actor.compute_advantages(batch)
        stats[step] = models.update(batch)
        saver.save(models.saved, step, {})
    models.destroy()
    yield Taken(folder, stats)
    groups.destroy()


def again(run: Taken, work: Path, source: Source, after: int = STEPS) -> Replayed:
    order = Order(
        overrides_of(source.facts),
        [str(path) for path in source.batches],
        str(source.checkpoint or ""),
        compare_to=str(run.folder.checkpoints / f"step_{after:06d}"),
    )
    work.mkdir(exist_ok=True)
    replay(order, work)
    groups.destroy()
    return Replayed(**json.loads((work / STATS).read_text()))


def test_a_step_from_the_checkpoint_before_it_has_the_runs_bits(run: Taken, tmp_path: Path) -> None:
    source = run.source(STEPS)
    assert source.start == STEPS - 1
    replayed = again(run, tmp_path, source)
    assert replayed.stats == run.stats[STEPS]
    assert set(replayed.gaps) == {"actor", "critic"}
    assert set(replayed.gaps["actor"]) == {"weight", "exp_avg", "exp_avg_sq"}
    assert replayed.same_state
    assert verdict(replayed, run.stats[STEPS], [])[0].startswith("bit for bit the run's step: metrics and state")
    figures = load_file(tmp_path / FIGURES)
    assert {"prox_logp", "ref_logp", "values", "advantages", "returns", "input_ids"} <= set(figures)


def test_the_kept_batches_lead_from_the_runs_start_to_the_same_bits(run: Taken, tmp_path: Path) -> None:
    paths = [run.folder.batches / f"step_{step:06d}.safetensors" for step in range(1, STEPS + 1)]
    replayed = again(run, tmp_path, Source(0, None, paths, run.source(STEPS).facts))
    assert replayed.stats == run.stats[STEPS]
    assert replayed.same_state


def test_another_batch_or_state_is_told_from_the_runs(run: Taken, tmp_path: Path) -> None:
    wrong = Source(1, run.folder.checkpoints / "step_000001", run.source(STEPS).batches, run.source(STEPS).facts)
    replayed = again(run, tmp_path, wrong)
    line, code = verdict(replayed, run.stats[STEPS], [])
    assert code == 1
    assert line.startswith("differs: ")
    count, largest, scale = replayed.gaps["critic"]["exp_avg"]
    assert count > 1000
    assert 0 < largest < scale


def test_gaps_of_a_state_are_summed_and_their_maxima_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"a": torch.tensor([10.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
    stored = {"a": torch.tensor([9.0, 2.0]), "b": torch.tensor([2.5, 4.5])}
    boxes = [{"start": [0], "stop": [2], "runs": [(0, 2, 0)]}]
    index = {name: {"boxes": boxes} for name in own}
    tensors = {key_of("exp_avg", name, [0]): values for name, values in own.items()}
    engine: Any = SimpleNamespace(snapshot_state=lambda: SimpleNamespace(index=index, tensors=tensors, rank=0))
    read = SimpleNamespace(read=lambda kind, name, start, stop, bounds: stored[name])
    monkeypatch.setattr(replayed_steps, "StoredState", lambda folder: read)
    assert replayed_steps.state_gaps(engine, Path()) == {"exp_avg": [3, 1.0, 9.0]}


def test_a_batch_without_what_a_preference_method_reads_is_refused(run: Taken) -> None:
    config = cli.load(["+experiment=dpo"])
    with pytest.raises(UserError, match=r"batch lacks is_chosen and ref_logp, which algorithm=dpo reads; choose"):
        check_replay(config, config, batch_of(1), None)


REFUSED = {
    "algorithm=remax": r"workflow remax, the step's are of rlvr",
    "algorithm=gdpo": r"batch lacks reward_columns, which algorithm=gdpo reads",
    "algorithm.n_minibatches=16": r"n_minibatches=16 is above the 12 samples",
    "algorithm=dpo": r"algorithm=dpo learns from preferences",
    "method=sft": r"method=sft: the step's batch is one of method=rl",
    "parallel.tp_size=3": r"tp_size=3 does not divide",
    "actor.dtype=bfloat16": r"float32, this run bfloat16",
    "model=tiny": r"a replay takes the groups algorithm and parallel",
    "algorithm.eps_clp=1": r"did you mean algorithm\.eps_clip",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_batch_and_checkpoint_do_not_fit_is_one_line(change: str, run: Taken) -> None:
    source = run.source(STEPS)
    batch = read_batch(source.batches[-1])

    def check() -> None:
        config = cli.load(overrides_of(source.facts, [change]))
        check_replay(cli.load(PPO), config, batch, source.checkpoint)

    with pytest.raises(UserError, match=REFUSED[change]) as refused:
        check()
    assert len(str(refused.value).splitlines()) == 1


def test_a_critic_that_the_checkpoint_lacks_and_groups_of_one_are_refused(run: Taken, tmp_path: Path) -> None:
    config, batch = cli.load(PPO), batch_of(1)
    with pytest.raises(UserError, match=r"algorithm=ppo needs a critic, which .* lacks"):
        check_replay(config, config, batch, tmp_path)
    batch["group_ids"] = torch.arange(batch.num_seqs)
    with pytest.raises(UserError, match=r"algorithm=grpo compares at least 2 completions .* the step has 1"):
        check_replay(config, cli.load([*PPO[:1], "algorithm=grpo"]), batch, None)


def test_changed_knobs_are_told_and_a_layout_is_held_to_its_bound(run: Taken) -> None:
    facts = run.source(STEPS).facts
    own = cli.load(overrides_of(facts))
    assert changed_knobs(own, cli.load(overrides_of(facts))) == []
    layout = changed_knobs(own, cli.load(overrides_of(facts, ["parallel=dp2"])))
    assert layout == ["parallel.dp_size=2"]
    assert changed_knobs(own, cli.load(overrides_of(facts, ["algorithm=grpo"]))) == ["algorithm=grpo"]
    before = {"loss": 2.0, "grad_norm": 3.0}
    for change, code in ((1 + 9e-6, 0), (1 + 2e-5, 1), (float("nan"), 1)):
        for name in before:
            replayed = Replayed({**before, name: before[name] * change}, {})
            assert verdict(replayed, before, layout)[1] == code, (name, change)
    lost = {"loss": float("nan"), "grad_norm": float("nan")}
    assert verdict(Replayed(dict(lost), {}), lost, [])[0].startswith("bit for bit"), "a step of NaN is replayed too"


def test_the_command_line_is_checked(tmp_path: Path) -> None:
    for words in ([], ["step=1"], ["run"], ["run", "step=0"], ["run", "step=x"]):
        with pytest.raises(UserError, match="usage: python -m megarl"):
            parse(words)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is there and not empty"):
        parse(["run", "step=1", f"keep={tmp_path}"])
