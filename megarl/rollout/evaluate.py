"""Measures how often the policy solves held-out problems, and keeps every sample."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.knobs import MAX_COUNT, MAX_WEIGHT, UserError, check_ranges, knob
from megarl.observe.metrics import stats_tracker
from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.types import GenerationHyperparameters, PackedBatch


@dataclass(frozen=True)
class EvaluatorConfig:
    """Schedule and sampling of held-out evaluations."""

    every_steps: int = knob(20, "training steps between evaluations; 0 is none in between", least=0, most=MAX_COUNT)
    at_start: bool = knob(True, "evaluate before the first step")
    at_end: bool = knob(True, "evaluate after the last step")
    n_samples: int = knob(1, "completions per problem; accuracy is the mean over all of them", least=1, most=MAX_COUNT)
    temperature: float = knob(1.0, "sampling temperature of the evaluation; 0 is greedy", least=0, most=100)
    correct_reward: float = knob(
        1.0, "least reward of a sample that counts as solved", least=-MAX_WEIGHT, most=MAX_WEIGHT
    )

    def __post_init__(self) -> None:
        check_ranges(self, "evaluator")

    def sampling(self, gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
        """The training's `gconfig` with the evaluation's sample count and temperature, for the workflow."""
        greedy = self.temperature == 0
        return gconfig.new(n_samples=self.n_samples, greedy=greedy, temperature=1.0 if greedy else self.temperature)

    def is_due(self, step: int, last_step: int) -> bool:
        """True if an evaluation is due after `step` training steps of `last_step`."""
        if step == 0:
            return self.at_start
        if step == last_step:
            return self.at_end
        return self.every_steps > 0 and step % self.every_steps == 0


@dataclass(frozen=True)
class Evaluation:
    """Results of one evaluation.

    `accuracy` is the fraction of samples that solve their problem (pass@1, mean@k); `stderr` is its standard error over
    problems. `pass_at_k` is the fraction of problems that one of their k samples solves. `maj_at_k` is the fraction of
    problems whose most frequent answer is right; ties go to the answer given first.
    """

    step: int
    accuracy: float
    stderr: float
    mean_reward: float
    pass_at_k: float
    maj_at_k: float
    num_problems: int
    num_samples: int
    num_rejected: int
    path: Path


class Evaluator:
    """Samples `problems` through `workflow` on its schedule; writes one JSONL file per evaluation to `folder`.

    The workflow is usually the training's class with `config.sampling(gconfig)`. It must return one reward per sample.
    """

    def __init__(
        self,
        config: EvaluatorConfig,
        workflow: RolloutWorkflow,
        problems: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        folder: Path,
        answer_of: Callable[[str], str] = str.strip,
    ):
        if not problems:
            raise UserError("the evaluator got no problems; give it a data set split with at least one row")
        self.config = config
        self.workflow = workflow
        self.problems = problems
        self.tokenizer = tokenizer
        self.folder = folder
        self.answer_of = answer_of  # extracts a completion's answer, for the majority vote

    def is_due(self, step: int, last_step: int) -> bool:
        """See `EvaluatorConfig.is_due`."""
        return self.config.is_due(step, last_step)

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
            majority = self._majority(batch, solved)
            evaluation = Evaluation(
                step=step,
                accuracy=float(solved.double().mean()),
                stderr=float(per_problem.std() / problems**0.5) if problems > 1 else float("nan"),
                mean_reward=float(rewards.mean()),
                pass_at_k=float((per_problem > 0).double().mean()),
                maj_at_k=float(majority.double().mean()),
                num_problems=problems,
                num_samples=batch.num_seqs,
                num_rejected=len(self.problems) - problems,
                path=self._write(batch, solved.tolist(), step),
            )
            stats_tracker.scalar(accuracy=evaluation.accuracy)
            if self.config.n_samples > 1:
                stats_tracker.scalar(pass_at_k=evaluation.pass_at_k, maj_at_k=evaluation.maj_at_k)
        return evaluation

    def _majority(self, batch: PackedBatch, solved: torch.Tensor) -> torch.Tensor:
        """bool `[problems]`: true where the most frequent answer of a problem's samples is right."""
        lengths = batch.lengths.tolist()
        sampled = zip(batch["input_ids"].split(lengths), batch["loss_mask"].split(lengths), strict=True)
        texts = self.tokenizer.batch_decode([i[m].tolist() for i, m in sampled], skip_special_tokens=True)
        votes: dict[int, Counter[str]] = {}
        right: dict[tuple[int, str], bool] = {}
        for problem, text, good in zip(batch["group_ids"].tolist(), texts, solved.tolist(), strict=True):
            answer = self.answer_of(text)
            votes.setdefault(problem, Counter())[answer] += 1
            right[problem, answer] = right.get((problem, answer), False) or good
        return torch.tensor([right[problem, counts.most_common(1)[0][0]] for problem, counts in votes.items()])

    def _write(self, batch: PackedBatch, solved: list[bool], step: int) -> Path:
        """Writes one line per sample: problem, prompt, completion, reward, solved, and its weight versions in order."""
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
