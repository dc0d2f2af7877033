"""Measures how often the policy solves held-out problems, and keeps every sample that it measured by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.knobs import UserError, knob
from megarl.observe.metrics import stats_tracker
from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.types import GenerationHyperparameters, PackedBatch


@dataclass(frozen=True)
class EvaluatorConfig:
    """When and how held-out problems are sampled."""

    every_steps: int = knob(20, "training steps between evaluations; 0 is none in between")
    at_start: bool = knob(True, "evaluate before the first step")
    at_end: bool = knob(True, "evaluate after the last step")
    n_samples: int = knob(1, "completions per problem; accuracy is the mean over all of them")
    temperature: float = knob(1.0, "sampling temperature of the evaluation; 0 is greedy")
    correct_reward: float = knob(1.0, "least reward of a sample that counts as solved")

    def __post_init__(self) -> None:
        for name, least in (("every_steps", 0), ("n_samples", 1), ("temperature", 0)):
            if getattr(self, name) < least:
                raise UserError(f"evaluator.{name}={getattr(self, name)} must be at least {least}")

    def sampling(self, gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
        """The training's `gconfig` with the sample count and temperature of evaluation, for the workflow."""
        greedy = self.temperature == 0
        return gconfig.new(n_samples=self.n_samples, greedy=greedy, temperature=1.0 if greedy else self.temperature)


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found. `stderr` is the standard error of `accuracy` over problems."""

    step: int
    accuracy: float
    stderr: float
    mean_reward: float
    num_problems: int
    num_samples: int
    num_rejected: int
    path: Path


class Evaluator:
    """Samples `problems` through `workflow` on its schedule; one JSONL file an evaluation in `folder`.

    The workflow is usually the training's class with `config.sampling(gconfig)`. It must give one reward a sample.
    """

    def __init__(
        self,
        config: EvaluatorConfig,
        workflow: RolloutWorkflow,
        problems: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        folder: Path,
    ):
        if not problems:
            raise UserError("the evaluator got no problems; give it a data set split with at least one row")
        self.config = config
        self.workflow = workflow
        self.problems = problems
        self.tokenizer = tokenizer
        self.folder = folder

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether to evaluate after `step` training steps of `last_step`."""
        if step == 0:
            return self.config.at_start
        if step == last_step:
            return self.config.at_end
        return self.config.every_steps > 0 and step % self.config.every_steps == 0

    def evaluate(self, engine: InferenceEngine, step: int) -> Evaluation:
        """Samples every problem, writes `step-<step>.jsonl` and records `eval/accuracy`."""
        with stats_tracker.scope("eval"):
            batch = engine.rollout_batch(self.problems, self.workflow)
            if "rewards" not in batch.sequences:
                raise UserError(
                    f"{type(self.workflow).__name__} gives a reward per token; evaluation needs one a sample"
                )
            rewards, groups = batch["rewards"], batch["group_ids"]
            solved = rewards >= self.config.correct_reward
            per_problem = torch.stack([solved[groups == group].double().mean() for group in groups.unique()])
            problems = len(per_problem)
            evaluation = Evaluation(
                step=step,
                accuracy=float(solved.double().mean()),
                stderr=float(per_problem.std() / problems**0.5) if problems > 1 else float("nan"),
                mean_reward=float(rewards.mean()),
                num_problems=problems,
                num_samples=batch.num_seqs,
                num_rejected=len(self.problems) - problems,
                path=self._write(batch, solved.tolist(), step),
            )
            stats_tracker.scalar(accuracy=evaluation.accuracy)
        return evaluation

    def _write(self, batch: PackedBatch, solved: list[bool], step: int) -> Path:
        """One line a sample: problem, prompt, completion, reward, whether solved, versions of its tokens in order."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{step:06d}.jsonl"
        lengths = batch.lengths.tolist()
        ids, masks = batch["input_ids"].split(lengths), batch["loss_mask"].split(lengths)
        prompts = self.tokenizer.batch_decode([i[~m].tolist() for i, m in zip(ids, masks, strict=True)])
        completions = self.tokenizer.batch_decode([i[m].tolist() for i, m in zip(ids, masks, strict=True)])
        versions = batch["versions"].split(lengths) if "versions" in batch else None
        with open(path, "w", encoding="utf-8") as file:
            for n, problem in enumerate(batch["group_ids"].tolist()):
                line = {
                    "step": step,
                    "problem": problem,
                    "prompt": prompts[n],
                    "completion": completions[n],
                    "reward": float(batch["rewards"][n]),
                    "solved": solved[n],
                    "versions": versions[n][masks[n]].unique_consecutive().tolist() if versions else [],
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return path
