"""Measures how often the policy solves held-out problems, and keeps every sample."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.knobs import MAX_COUNT, MAX_WEIGHT, UserError, check_ranges, knob
from megarl.observe.metrics import stats_tracker
from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.estimates import Estimate, mean_of, pass_at_k
from megarl.rollout.sample_lines import turns_of
from megarl.types import GenerationHyperparameters, PackedBatch


@dataclass(frozen=True)
class EvaluatorConfig:
    """Schedule and sampling of held-out evaluations."""

    every_steps: int = knob(20, "training steps between evaluations; 0 is none in between", least=0, most=MAX_COUNT)
    at_start: bool = knob(True, "evaluate before the first step")
    at_end: bool = knob(True, "evaluate after the last step")
    n_samples: int = knob(1, "completions per problem; accuracy is the mean over all of them", least=1, most=MAX_COUNT)
    pass_at: list[int] = knob(
        factory=list,
        meaning="values of k: pass@k is measured without bias, from all n_samples of a problem",
        least=1,
        most=MAX_COUNT,
    )
    confidence: float = knob(0.95, "probability that the intervals of evaluations are to cover", above=0, below=1)
    temperature: float = knob(1.0, "sampling temperature of the evaluation; 0 is greedy", least=0, most=100)
    correct_reward: float = knob(
        1.0, "least reward of a sample that counts as solved", least=-MAX_WEIGHT, most=MAX_WEIGHT
    )

    def __post_init__(self) -> None:
        check_ranges(self, "evaluator")
        if (largest := max(self.pass_at, default=0)) > self.n_samples:
            raise UserError(
                f"evaluator.pass_at={self.pass_at}: pass@{largest} needs at least {largest} samples of each problem, "
                f"and evaluator.n_samples={self.n_samples}; raise it, or leave {largest} out"
            )

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


def record_estimates(estimates: Mapping[str, Mapping[str, Estimate]]) -> None:
    """Records each measure as `[SET/]NAME`, `NAME_low` and `NAME_high`, with `_at_` for `@`.

    The accuracy of all problems is recorded by its caller. Measures without a problem are left out.
    """
    for label, measures in estimates.items():
        for measure, estimate in measures.items():
            name = f"{label}/" * bool(label) + measure.replace("@", "_at_")
            if math.isnan(estimate.value):
                continue
            stats_tracker.scalar(**{f"{name}_low": estimate.low, f"{name}_high": estimate.high})
            if label or measure != "accuracy":
                stats_tracker.scalar(**{name: estimate.value})


@dataclass(frozen=True)
class Evaluation:
    """Results of one evaluation.

    `accuracy` is the fraction of samples that solve their problem (pass@1, mean@k); `stderr` is its standard error over
    problems. `pass_at_k` is the fraction of problems that one of their k samples solves. `maj_at_k` is the fraction of
    problems whose most frequent answer is right; ties go to the answer given first. `estimates` holds measures with
    intervals for each evaluation set, and for all problems under the name "". They are `accuracy` as the mean over
    problems, `pass@k` for each k of `pass_at`, and `maj@n`.
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
    estimates: dict[str, dict[str, Estimate]] = field(default_factory=dict)


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
        sets: Sequence[str] = (),
    ):
        """`sets` names the evaluation set of each problem, if there are several."""
        if not problems:
            raise UserError("the evaluator got no problems; give it a data set split with at least one row")
        self.config = config
        self.workflow = workflow
        self.problems = problems
        self.tokenizer = tokenizer
        self.folder = folder
        self.sets = sets
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
            rewards, groups = batch.of_samples("rewards"), batch.of_samples("group_ids")
            solved = rewards >= self.config.correct_reward
            per_problem = torch.stack([solved[groups == group].double().mean() for group in groups.unique()])
            problems = len(per_problem)
            texts = self._sampled_texts(batch, skip_special_tokens=True)
            majority = self._majority(texts, groups.tolist(), solved)
            estimates = self._estimates(groups, solved, majority)
            evaluation = Evaluation(
                step=step,
                accuracy=float(solved.double().mean()),
                stderr=float(per_problem.std() / problems**0.5) if problems > 1 else float("nan"),
                mean_reward=float(rewards.mean()),
                pass_at_k=float((per_problem > 0).double().mean()),
                maj_at_k=float(majority.double().mean()),
                num_problems=problems,
                num_samples=len(rewards),
                num_rejected=len(self.problems) - problems,
                path=self._write(batch, solved.tolist(), step),
                estimates=estimates,
            )
            stats_tracker.scalar(accuracy=evaluation.accuracy)
            if self.config.n_samples > 1:
                stats_tracker.scalar(pass_at_k=evaluation.pass_at_k, maj_at_k=evaluation.maj_at_k)
            record_estimates(estimates)
        return evaluation

    def _estimates(
        self, groups: torch.Tensor, solved: torch.Tensor, majority: torch.Tensor
    ) -> dict[str, dict[str, Estimate]]:
        """Measures of all problems, and of each evaluation set.

        A problem counts for pass@k if k of its samples could be scored.
        """
        scored: dict[int, list[bool]] = {}
        for problem, right in zip(groups.tolist(), solved.tolist(), strict=True):
            scored.setdefault(problem, []).append(right)
        votes = dict(zip(scored, majority.tolist(), strict=True))
        confidence = self.config.confidence

        def measure(problems: list[int]) -> dict[str, Estimate]:
            shares = [sum(scored[p]) / len(scored[p]) for p in problems]
            measured = {"accuracy": mean_of(shares, confidence)}
            for k in self.config.pass_at:
                chances = [pass_at_k(len(s), sum(s), k) for s in (scored[p] for p in problems) if len(s) >= k]
                measured[f"pass@{k}"] = mean_of(chances, confidence)
            if self.config.n_samples > 1:
                measured[f"maj@{self.config.n_samples}"] = mean_of([float(votes[p]) for p in problems], confidence)
            return measured

        members = {label: [p for p in scored if self.sets[p] == label] for label in dict.fromkeys(self.sets)}
        return {label: measure(problems) for label, problems in {"": list(scored), **members}.items()}

    def _sampled_texts(self, batch: PackedBatch, skip_special_tokens: bool) -> list[str]:
        """The text that the model wrote in each sample, over all its segments."""
        tokens = [ids.tolist() for ids in trained_of_samples(batch, "input_ids")]
        return list(self.tokenizer.batch_decode(tokens, skip_special_tokens=skip_special_tokens))

    def _majority(self, texts: list[str], groups: list[int], solved: torch.Tensor) -> torch.Tensor:
        """bool `[problems]`: true where the most frequent answer of a problem's samples is right."""
        votes: dict[int, Counter[str]] = {}
        right: dict[tuple[int, str], bool] = {}
        for problem, text, good in zip(groups, texts, solved.tolist(), strict=True):
            answer = self.answer_of(text)
            votes.setdefault(problem, Counter())[answer] += 1
            right[problem, answer] = right.get((problem, answer), False) or good
        return torch.tensor([right[problem, counts.most_common(1)[0][0]] for problem, counts in votes.items()])

    def _write(self, batch: PackedBatch, solved: list[bool], step: int) -> Path:
        """Writes one line per sample: problem, prompt, completion, reward, solved, and its weight versions in order.

        For a sample in several segments, the prompt is the last segment's, with the number of segments. A conversation
        of several turns also has the last segment's `turns` (`sample_lines.turns_of`).
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{step:06d}.jsonl"
        samples, lengths = batch.samples, batch.lengths.tolist()
        ids, masks = batch["input_ids"].split(lengths), batch["loss_mask"].split(lengths)
        last = dict(zip(samples.tolist(), zip(ids, masks, strict=True), strict=True))  # segment of each sample
        prompts = self.tokenizer.batch_decode([last[n][0][~last[n][1]].tolist() for n in range(len(last))])
        completions = self._sampled_texts(batch, skip_special_tokens=False)
        versions = trained_of_samples(batch, "versions") if "versions" in batch else []
        segments, rewards = samples.bincount().tolist(), batch.of_samples("rewards").tolist()
        with open(path, "w", encoding="utf-8") as file:
            for n, problem in enumerate(batch.of_samples("group_ids").tolist()):
                line = {
                    "step": step,
                    "problem": problem,
                    "prompt": prompts[n],
                    "completion": completions[n],
                    "reward": rewards[n],
                    "solved": solved[n],
                    "versions": versions[n].unique_consecutive().tolist() if versions else [],
                }
                if segments[n] > 1:
                    line["segments"] = segments[n]
                turns = turns_of(self.tokenizer, *last[n])
                if len(turns) > 2:
                    line["turns"] = turns
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return path


def trained_of_samples(batch: PackedBatch, key: str) -> list[torch.Tensor]:
    """Values of `key` at the trained tokens of each sample, over all its segments, which are next to each other."""
    mask = batch["loss_mask"]
    owner = batch.owners[mask]
    return list(batch[key][mask].split(torch.bincount(owner, minlength=batch.num_samples).tolist()))
