"""GRPO on GSM8K as a script: the loop behind `+experiment=gsm8k_grpo`, spelt out to be changed.

python -m megarl.launcher.local examples/gsm8k_grpo.py --config examples/gsm8k_grpo.yaml [knob=value ...]

The launcher runs it on every trainer rank, beside SGLang servers that it finds in its environment. Every rank trains on
the same batch, which rank 0 samples.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

from megarl.actor.api import FinetuneSpec
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.reference import MegatronReference
from megarl.algorithms import GRPOConfig, algorithm_of
from megarl.cli import load_expr_config
from megarl.data.config import DatasetConfig
from megarl.data.prompts import load_gsm8k
from megarl.data.tokenizer import load_hf_tokenizer
from megarl.observe.gpu import log_gpu_stats
from megarl.observe.logger import StatsLogger
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import RunFolder
from megarl.parallel.broadcast import broadcast_batch
from megarl.reshard.session import WeightSession
from megarl.rewards.gsm8k import extract_solution
from megarl.rollout.client.sglang_client import KEY_VARIABLE, RemoteSGLangEngine
from megarl.rollout.evaluate import Evaluator
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.types import WeightUpdateMeta


def get_gsm8k_dataset(config: DatasetConfig) -> Any:
    """Rows with the `messages` that the workflow asks, and the `answer` that the reward reads."""

    def process(row: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": row["question"]}]}

    return load_gsm8k(config.path, config.split, config.name).map(process).remove_columns(["question"])


def gsm8k_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **kwargs: Any
) -> float:
    found, right = extract_solution(completions, method="flexible"), extract_solution(answer, method="strict")
    return float(found is not None and found == right)


def main(args: list[str]) -> None:
    config, _ = load_expr_config(args, GRPOConfig)
    folder, algorithm = RunFolder(Path(os.environ["MEGARL_RUN_FOLDER"])), algorithm_of(config.algorithm)

    actor = MegatronPPOActor(config.actor, algorithm, config.parallel)
    actor.initialize(None, FinetuneSpec(1, config.total_train_steps, 1))
    ref = None
    if algorithm.needs_reference:
        ref = MegatronReference(config.actor, config.parallel)
        ref.initialize()

    chief = dist.get_rank() == 0
    rollout = RemoteSGLangEngine(config.rollout)
    if chief:
        rollout.initialize()
        tokenizer = load_hf_tokenizer(config.actor.path)
        workflow = RLVRWorkflow(gsm8k_reward_fn, config.gconfig, tokenizer)
        train_dataloader = StatefulDataLoader(
            get_gsm8k_dataset(config.train_dataset),
            batch_size=config.train_dataset.batch_size,
            shuffle=config.train_dataset.shuffle,
            num_workers=config.train_dataset.num_workers,
            drop_last=config.train_dataset.drop_last,
            collate_fn=list,
        )
        evaluator = Evaluator(
            config.evaluator,
            RLVRWorkflow(gsm8k_reward_fn, config.evaluator.sampling(config.gconfig), tokenizer),
            list(get_gsm8k_dataset(config.valid_dataset)),
            tokenizer,
            folder.path / "evaluations",
        )
        logger = StatsLogger(folder.path, config.logger)
    weights = WeightSession(config.reshard, rollout.addresses, os.environ.get(KEY_VARIABLE, ""))
    rollout.connect(weights)
    actor.connect(weights)

    for step in range(1, config.total_train_steps + 1):
        with stats_tracker.record_timing("rollout"):
            batch = rollout.prepare_batch(train_dataloader, workflow=workflow) if chief else None
        batch = broadcast_batch(batch)

        batch["prox_logp"] = actor.compute_logp(batch)
        if ref is not None:
            batch["ref_logp"] = ref.compute_logp(batch)
            log_gpu_stats("ref logp")
        actor.compute_advantages(batch)
        with stats_tracker.record_timing("update"):
            stats = actor.ppo_update(batch)
        actor.step_lr_scheduler()

        path = folder.path / "weights" / f"step_{step}"  # as files; reshard.transport knows faster ways
        meta = WeightUpdateMeta(type="disk", path=str(path), model_version=step)
        if chief:
            future = rollout.update_weights(meta)
        actor.upload_weights(meta)
        if chief:
            report = future.result()
            shutil.rmtree(path, ignore_errors=True)
            rollout.set_version(step)
            with stats_tracker.scope("train"):
                stats_tracker.scalar(**stats)
            with stats_tracker.scope("sync"):
                stats_tracker.scalar(verified=float(report.verified > 0))
            if evaluator.is_due(step, config.total_train_steps):
                evaluator.evaluate(rollout, step)
            found = stats_tracker.export()
            logger.commit(step, found)
            print(f"step {step}: reward {found['rollout/reward']:.3f}, loss {found['train/loss']:.4f}", flush=True)
        dist.barrier()

    actor.save(folder.path / "hf")
    weights.close()
    if chief:
        logger.close()
        rollout.destroy()
    actor.destroy()


if __name__ == "__main__":
    main(sys.argv[1:])
