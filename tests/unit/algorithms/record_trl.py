"""Records the results of TRL's losses and advantages on fixed log-probs in `trl_figures.json`.

    pip install trl==1.16.0      # in an environment of its own
    python tests/unit/algorithms/record_trl.py

TRL's methods are called with a stand-in for the trainer, which has the settings, and a model that returns the recorded
log-probs. TRL computes advantages inside a longer method, so those lines are cut out of the source and run.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import trl
from torch import Tensor
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer import grpo_trainer, rloo_trainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

LENGTHS = [5, 7, 4, 6, 9, 3, 5, 8]  # of completions: two groups of four, or four pairs, or eight labelled ones
GROUP = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo_kl": {"loss_type": "grpo", "beta": 0.1},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
}
REWARDS = [1.0, 0.0, 1.0, 0.25, 1.0, 0.0, -1.0, 0.5]


def identity(x: Any, *_: Any, **__: Any) -> Any:
    return x


def trainer(**settings: Any) -> Any:
    """Builds a stand-in for `self`: one process, no logging."""
    accelerator = MagicMock()
    accelerator.device = torch.device("cpu")
    accelerator.num_processes, accelerator.process_index = 1, 0
    accelerator.gather = accelerator.gather_for_metrics = accelerator.reduce = identity
    defaults = {
        "accelerator": accelerator, "model": SimpleNamespace(training=True), "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)), "current_gradient_accumulation_steps": 1,
        "_total_train_tokens": 0, "_tp_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **settings})


def inputs() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    logprobs, old, ref = ((-1.5 + 0.25 * torch.randn(shape, generator=g)) * mask for _ in range(3))
    second = torch.randn(shape[0], generator=g)
    advantages = torch.randn(shape[0], generator=g)
    return {
        "mask": mask, "logprobs": logprobs, "old": old, "ref": ref, "advantages": advantages, "second_reward": second
    }  # fmt: skip


def gradient(loss: Tensor, logprobs: Tensor, mask: Tensor) -> dict[str, Any]:
    loss.backward()
    assert logprobs.grad is not None
    return {"loss": loss.item(), "gradient": logprobs.grad[mask].tolist()}


def grpo(fixed: dict[str, Tensor], **settings: Any) -> dict[str, Any]:
    """Runs GRPOTrainer._compute_loss with a policy that differs from the behaviour policy."""
    logprobs, mask = fixed["logprobs"].clone().requires_grad_(), fixed["mask"]
    knobs = {
        "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2,
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False, "max_completion_length": 12,
        "_entropy_bonus_enabled": False, **settings,
    }  # fmt: skip
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    stand_in = trainer(**knobs, args=args)
    entropy = torch.zeros_like(logprobs)
    stand_in._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropy, None)
    ids = torch.zeros_like(mask, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": mask.long(),
        "advantages": fixed["advantages"], "old_per_token_logps": fixed["old"], "ref_per_token_logps": fixed["ref"],
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    return gradient(GRPOTrainer._compute_loss(stand_in, None, batch), logprobs, mask)


def rloo(fixed: dict[str, Tensor]) -> dict[str, Any]:
    """Runs RLOOTrainer._compute_loss for the first step on a batch."""
    logprobs, mask = fixed["logprobs"].clone().requires_grad_(), fixed["mask"]
    stand_in = trainer(epsilon_low=0.2, epsilon_high=0.2)
    stand_in._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    ids = torch.zeros_like(mask, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": mask.long(),
        "advantages": fixed["advantages"], "old_logps": (fixed["logprobs"] * mask).sum(1),
    }  # fmt: skip
    return gradient(RLOOTrainer._compute_loss(stand_in, None, batch), logprobs, mask)


def passage(module: Any, first: str, last: str) -> str:
    """Returns a module's lines from one that begins with `first` to the next that begins with `last`."""
    lines = inspect.getsource(module).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    end = next(i for i in range(start, len(lines)) if lines[i].strip().startswith(last))
    return textwrap.dedent("\n".join(lines[start : end + 1]))


def rloo_advantages(rewards: Tensor) -> dict[str, list[float]]:
    """Runs RLOOTrainer's lines on rewards `[samples]`."""
    names = {
        **vars(rloo_trainer), "self": SimpleNamespace(normalize_advantages=False), "rewards": rewards,
        "grouped_rewards": rewards.view(-1, GROUP), "num_generations": GROUP,
    }  # fmt: skip
    text = passage(rloo_trainer, "scorable_counts =", "advantages = torch.nan_to_num")
    exec(compile(text, rloo_trainer.__file__, "exec"), names)
    return {"rewards": rewards.tolist(), "advantages": names["advantages"].tolist()}


def advantages(module: Any, first: str, rewards: Tensor, **settings: Any) -> dict[str, list[float]]:
    """Runs the trainer's lines on rewards `[samples, functions]`."""
    weights = torch.ones(rewards.shape[1])
    stand_in = SimpleNamespace(reward_weights=weights, reward_funcs=[None] * rewards.shape[1], **settings)
    names = {
        **vars(module), "self": stand_in, "rewards_per_func": rewards, "num_generations": GROUP,
        "device": rewards.device, "unscorable_mask": torch.isnan(rewards).all(1),
    }  # fmt: skip
    exec(compile(passage(module, first, "advantages = torch.nan_to_num"), module.__file__, "exec"), names)
    return {"rewards": names["rewards"].tolist(), "advantages": names["advantages"].tolist()}


def outputs_of(logprobs: Tensor) -> Any:
    """Builds the output of TRL's fused head: one value for every token but the first."""
    zeros = torch.zeros_like(logprobs).detach()
    return SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def offline(fixed: dict[str, Tensor], order: list[int], kind: Any, extra: dict[str, Any], **settings: Any) -> Any:
    """Runs the DPO or KTO trainer's `_compute_loss` on the completions in `order`, each after a one-token prompt."""
    logprobs, mask = fixed["logprobs"].clone().requires_grad_(), fixed["mask"]
    completion_mask = torch.nn.functional.pad(mask[order].long(), (1, 0))
    ids = torch.ones_like(completion_mask)
    batch = {"input_ids": ids, "attention_mask": ids, "completion_mask": completion_mask, **extra}
    stand_in = trainer(precompute_ref_logps=True, **settings)
    loss = kind._compute_loss(stand_in, lambda **_: outputs_of((logprobs * mask)[order]), batch, False)
    return gradient(loss, logprobs, mask)


def preferences(fixed: dict[str, Tensor]) -> dict[str, Any]:
    chosen, rejected = [0, 2, 4, 6], [1, 3, 5, 7]
    ref = (fixed["ref"] * fixed["mask"]).sum(1)
    results: dict[str, Any] = {}
    for name, kind in (("dpo", "sigmoid"), ("ipo", "ipo")):
        knobs = {
            "loss_types": [kind], "loss_weights": [1.0], "beta": 0.1, "label_smoothing": 0.0, "ld_alpha": None,
            "f_divergence_type": "reverse_kl", "use_weighting": False,
        }  # fmt: skip
        extra = {"ref_chosen_logps": ref[chosen], "ref_rejected_logps": ref[rejected]}
        results[name] = offline(fixed, chosen + rejected, DPOTrainer, extra, **knobs)
    kl = torch.full((8,), 0.7)
    knobs = {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.2, "undesirable_weight": 0.8, "calculate_KL": True}
    labels = torch.tensor([i % 2 == 0 for i in range(8)])
    extra = {"label": labels, "ref_logps": ref, "ref_KL_logps": torch.zeros(8)}
    results["kto"] = offline(fixed, list(range(8)), KTOTrainer, extra, **knobs, _compute_kl_logps=lambda *_: kl)
    counts = fixed["mask"].sum(1)
    for name in ("orpo", "simpo"):
        logprobs = fixed["logprobs"].clone().requires_grad_()
        means = (logprobs * fixed["mask"]).sum(1) / counts
        if name == "orpo":
            ratio = ORPOTrainer.odds_ratio_loss(trainer(beta=0.1), means[chosen], means[rejected])[0]
            loss = -means[chosen].mean() - ratio.mean()  # joined as in its get_batch_loss_metrics
        else:
            knobs = {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.5, "label_smoothing": 0.0, "alpha": 0.0}
            loss = CPOTrainer.cpo_loss(trainer(**knobs), means[chosen], means[rejected])[0].mean()
        results[name] = gradient(loss, logprobs, fixed["mask"])
    return results


def main() -> None:
    fixed = inputs()
    rewards = torch.stack([torch.tensor(REWARDS), fixed["second_reward"]], 1)
    first = "if self.multi_objective_aggregation"
    figures = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "lengths": LENGTHS,
        "rewards": rewards.tolist(),
        "inputs": {name: fixed[name][fixed["mask"]].tolist() for name in ("logprobs", "old", "ref")},
        "advantages": fixed["advantages"].tolist(),
        "losses": {**{name: grpo(fixed, **knobs) for name, knobs in SETTINGS.items()}, "rloo": rloo(fixed)},
        "preferences": preferences(fixed),
        "advantages_of": {
            "grpo": advantages(
                grpo_trainer, first, rewards[:, :1],
                multi_objective_aggregation="sum_then_normalize", scale_rewards="group",
            ),
            "dr_grpo": advantages(
                grpo_trainer, first, rewards[:, :1],
                multi_objective_aggregation="sum_then_normalize", scale_rewards="none",
            ),
            "rloo": rloo_advantages(rewards[:, 0]),
            "gdpo": advantages(grpo_trainer, first, rewards, multi_objective_aggregation="normalize_then_sum"),
        },
    }  # fmt: skip
    path = Path(__file__).with_name("trl_figures.json")
    path.write_text(json.dumps(figures, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
