"""The ranks of a replay: they take some steps of a run again, from kept batches and without servers or data.

`megarl.replay` starts them with an order (`order.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file

from megarl import cli
from megarl.actor.api import FinetuneSpec
from megarl.actor.checkpoint.stored_state import StoredState, key_of
from megarl.actor.critic import MegatronScalarEngine
from megarl.actor.engine import MegatronEngine
from megarl.actor.supervised import MegatronLMEngine
from megarl.algorithms import RewardModelConfig, algorithm_of
from megarl.config import Config, SaverConfig
from megarl.parallel.broadcast import gather_json
from megarl.trainer import rl
from megarl.trainer.checkpoints.saver import ACTOR, Saver
from megarl.trainer.preference import Preferences
from megarl.trainer.replay.kept_batches import read_batch, read_facts
from megarl.trainer.replay.order import FIGURES, STATS, Order
from megarl.types import PackedBatch

Step = Callable[[PackedBatch], tuple[PackedBatch, dict[str, float]]]  # to the batch with its figures, and metrics


def learner_of(config: Config) -> tuple[Mapping[str, MegatronEngine], Step]:
    """Builds the engines of a run, by their names in its checkpoints, and the step that trains them on a batch."""
    spec = FinetuneSpec(1, config.total_train_steps, 1)
    if config.method == "rl":
        models = rl.Models.build(config, algorithm_of(config.algorithm))

        def policy_step(batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
            models.score(batch)
            models.actor.compute_advantages(batch)
            return batch, models.update(batch)

        return models.saved, policy_step
    if config.method == "sft":
        model = MegatronLMEngine(config.actor, config.parallel)
        model.initialize(ft_spec=spec)

        def supervised_step(batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
            stats = model.train_lm(batch)
            model.step_lr_scheduler()
            return batch, stats

        return {ACTOR: model}, supervised_step
    scores = isinstance(config.algorithm, RewardModelConfig)
    engine = (MegatronScalarEngine if scores else MegatronEngine)(config.actor, config.parallel)
    engine.initialize(ft_spec=spec)
    preferences = Preferences(engine, algorithm_of(config.algorithm), "values" if scores else "logprobs", {})

    def preference_step(batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
        batch = preferences.prepare(batch)
        return batch, preferences.update(batch)

    return {ACTOR: engine}, preference_step


def replay(order: Order, work: Path) -> None:
    """Takes the steps, and has rank 0 write the last one's metrics and figures of tokens to `work`. A collective."""
    config = cli.composed(order.overrides)
    engines, take = learner_of(config)
    if order.state:
        for name, engine in engines.items():
            engine.load_state(Path(order.state) / name)
    paths = [Path(name) for name in order.batches]
    stats: dict[str, float] = {}
    batch = None
    for path in paths:
        batch, stats = take(read_batch(path))
    if order.save_to:
        saver = Saver(SaverConfig(asynchronous=False), Path(order.save_to), lambda _: None)
        saver.save(engines, read_facts(paths[-1]).step, {})
    if order.hf_to:
        engines[ACTOR].save(Path(order.hf_to))
    gaps = {}
    if order.compare_to:
        for name, engine in engines.items():
            gaps[name] = state_gaps(engine, Path(order.compare_to) / name)
    if engines[ACTOR].groups.rank == 0:
        (work / STATS).write_text(json.dumps({"stats": stats, "gaps": gaps}))
        if batch is not None:
            tensors = {**batch.tokens, **batch.sequences, "cu_seqlens": batch.cu_seqlens}
            save_file({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, work / FIGURES)


def state_gaps(engine: MegatronEngine, folder: Path) -> dict[str, list[float]]:
    """Compares the engine's state with a stored one of any layout. A collective.

    Returns by kind (weight, exp_avg, ...) the number of elements that differ in a bit, the largest difference, and the
    largest stored magnitude.
    """
    snapshot, stored = engine.snapshot_state(), StoredState(folder)
    local: dict[str, list[float]] = {}
    for name, entry in snapshot.index.items():
        for box in entry["boxes"]:
            bounds = [(first, last) for first, last, rank in box["runs"] if rank == snapshot.rank]
            for kind in ("weight", "main", "exp_avg", "exp_avg_sq"):
                own = snapshot.tensors.get(key_of(kind, name, box["start"]))
                if own is None or not bounds or not own.numel():
                    continue
                theirs = stored.read(kind, name, tuple(box["start"]), tuple(box["stop"]), bounds[0])
                gap = local.setdefault(kind, [0.0, 0.0, 0.0])
                gap[0] += int((own != theirs).sum())
                gap[1] = max(gap[1], float((own.double() - theirs.double()).abs().max()))
                gap[2] = max(gap[2], float(theirs.double().abs().max()))
    gaps: dict[str, list[float]] = {}
    for part in gather_json(local):
        for kind, values in part.items():
            before = gaps.setdefault(kind, [0.0, 0.0, 0.0])
            gaps[kind] = [before[0] + values[0], max(before[1], values[1]), max(before[2], values[2])]
    return gaps
