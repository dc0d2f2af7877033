"""The two interfaces of rollout: an engine that answers requests, a workflow that turns a prompt into training data."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megarl.types import ModelRequest, ModelResponse, PackedBatch, Reward, RewardError


class InferenceEngine(abc.ABC):
    """Something that generates completions and knows which version of the policy weights it serves."""

    @abc.abstractmethod
    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One completion of `req.input_ids`. `req.gconfig.n_samples` is the workflow's business and is ignored."""

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Says that the servers now hold the trainer's weights of step `version`."""

    @abc.abstractmethod
    def get_version(self) -> int:
        """The version last set; 0 at the start."""

    @abc.abstractmethod
    def rollout_batch(self, data: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow) -> PackedBatch:
        """Runs one episode per item of `data` at once and returns their groups in the order of `data`."""


class RolloutWorkflow(abc.ABC):
    """How one prompt becomes training data: the class that users write."""

    @abc.abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Runs one episode on one item of the data set.

        Returns a padded dict or TensorDict `[n_samples, length]` with `input_ids`, `attention_mask`, `loss_mask` and
        `rewards`, best also `rollout_logprobs` and `versions`; or None to reject the prompt.
        """


def pad_responses(responses: Sequence[ModelResponse], rewards: Sequence[float | RewardError]) -> dict[str, Tensor]:
    """Completions and their rewards `[n]` as the padded dict that a workflow returns.

    `[n, length]`, padded on the right: `input_ids` int64; `attention_mask` bool; `loss_mask` bool, true on sampled
    tokens; `rollout_logprobs` float32, 0 on the prompt; `versions` int32, -1 on the prompt. `[n]`: `rewards` float32;
    `reward_failed` bool, true where the reward is a `RewardError`: such a sample has reward 0 and no token in its
    `loss_mask`. `reward_columns` float32 `[n, k]`, where the rewards are sums of several.
    """
    if len(responses) != len(rewards):
        raise ValueError(f"{len(responses)} responses need as many rewards, got {len(rewards)}")

    def padded(rows: list[list[Any]], dtype: torch.dtype, fill: float) -> Tensor:
        return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True, padding_value=fill)

    failed = [isinstance(reward, RewardError) for reward in rewards]
    trained = [[not lost] * r.output_len for r, lost in zip(responses, failed, strict=True)]
    totals = [0.0 if isinstance(reward, RewardError) else float(reward) for reward in rewards]
    result = {
        "input_ids": padded([r.input_tokens + r.output_tokens for r in responses], torch.int64, 0),
        "attention_mask": padded([[True] * (r.input_len + r.output_len) for r in responses], torch.bool, False),
        "loss_mask": padded(
            [[False] * r.input_len + row for r, row in zip(responses, trained, strict=True)], torch.bool, False
        ),
        "rollout_logprobs": padded([[0.0] * r.input_len + r.output_logprobs for r in responses], torch.float32, 0.0),
        "versions": padded([[-1] * r.input_len + r.output_versions for r in responses], torch.int32, -1),
        "rewards": torch.tensor(totals, dtype=torch.float32),
        "reward_failed": torch.tensor(failed),
    }
    parts = [reward.parts for reward in rewards if isinstance(reward, Reward)]
    if parts:
        none = (0.0,) * len(parts[0])
        result["reward_columns"] = torch.tensor([getattr(reward, "parts", none) for reward in rewards])
    return result
