"""Conversations as the tokens that were really exchanged: what the model sampled is never tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.knobs import UserError
from megarl.types import ModelResponse, Reward, RewardError


@dataclass
class Transcript:
    """One conversation, token by token: its ids, which of them were sampled (and are trained on), their behaviour
    log-probs (0 on given ones) and weight versions (-1 on given ones)."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @staticmethod
    def of(response: ModelResponse) -> Transcript:
        """A prompt and its one completion."""
        transcript = Transcript()
        transcript.give(response.input_tokens)
        transcript.sample(response)
        return transcript

    def give(self, ids: Sequence[int]) -> None:
        """Appends tokens that the model read: a prompt, a user's turn, a tool's output."""
        self.tokens += ids
        self.sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sample(self, response: ModelResponse) -> None:
        """Appends what the model answered to all tokens so far."""
        self.tokens += response.output_tokens
        self.sampled += [True] * response.output_len
        self.logprobs += response.output_logprobs
        self.versions += response.output_versions

    def copy(self) -> Transcript:
        """The same conversation, to go on from apart."""
        return Transcript(list(self.tokens), list(self.sampled), list(self.logprobs), list(self.versions))


def pad_transcripts(transcripts: Sequence[Transcript], rewards: Sequence[float | RewardError]) -> dict[str, Tensor]:
    """Conversations and their rewards `[n]` as the padded dict that a workflow returns.

    `[n, length]`, padded on the right: `input_ids` int64; `attention_mask` bool; `loss_mask` bool, true on sampled
    tokens; `rollout_logprobs` float32, 0 on given tokens; `versions` int32, -1 on given tokens. `[n]`: `rewards`
    float32; `reward_failed` bool, true where the reward is a `RewardError`: such a sample has reward 0 and no token in
    its `loss_mask`. `reward_columns` float32 `[n, k]`, where the rewards are sums of several.
    """
    if len(transcripts) != len(rewards):
        raise ValueError(f"{len(transcripts)} responses need as many rewards, got {len(rewards)}")

    longest = max(len(t.tokens) for t in transcripts)

    def padded(rows: list[list[Any]], dtype: Any, fill: float) -> Tensor:  # by numpy, which reads lists 4 times as fast
        return torch.from_numpy(np.array([row + [fill] * (longest - len(row)) for row in rows], dtype))

    lengths = torch.tensor([len(t.tokens) for t in transcripts])
    failed = torch.tensor([isinstance(reward, RewardError) for reward in rewards])
    totals = [0.0 if isinstance(reward, RewardError) else float(reward) for reward in rewards]
    result = {
        "input_ids": padded([t.tokens for t in transcripts], np.int64, 0),
        "attention_mask": torch.arange(longest) < lengths[:, None],
        "loss_mask": padded([t.sampled for t in transcripts], np.bool_, False) & ~failed[:, None],
        "rollout_logprobs": padded([t.logprobs for t in transcripts], np.float32, 0.0),
        "versions": padded([t.versions for t in transcripts], np.int32, -1),
        "rewards": torch.tensor(totals, dtype=torch.float32),
        "reward_failed": failed,
    }
    parts = [reward.parts for reward in rewards if isinstance(reward, Reward)]
    if parts:
        none = (0.0,) * len(parts[0])
        result["reward_columns"] = torch.tensor([getattr(reward, "parts", none) for reward in rewards])
    return result


def pad_responses(responses: Sequence[ModelResponse], rewards: Sequence[float | RewardError]) -> dict[str, Tensor]:
    """`pad_transcripts` of single completions and their rewards."""
    return pad_transcripts([Transcript.of(response) for response in responses], rewards)


def prompt_ids(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    """The chat template's token ids up to where the model answers, or the text's own where the tokenizer (a base
    model's) has no template. `options` go to the template, such as `tools` or `enable_thinking`."""
    if not tokenizer.chat_template:
        return list(tokenizer.encode("".join(str(message["content"]) for message in messages)))
    return list(
        tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=True, return_dict=False, **options
        )
    )


def turn_ids(tokenizer: Any, answered: Sequence[int], turns: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    """The tokens that bring a conversation whose last answer was `answered` through `turns` to the next answer.

    They are what the template writes behind an assistant's text. The end-of-turn token, which the answer may have
    ended with itself, is not repeated.

    Raises:
        UserError: the template rewrites what came before, so that a conversation cannot go on token by token.
    """
    if not tokenizer.chat_template:
        return list(tokenizer.encode("".join(str(turn["content"]) for turn in turns)))
    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\x01"}]
    text = tokenizer.apply_chat_template(
        [*before, *turns], tokenize=False, add_generation_prompt=True, return_dict=False, **options
    )
    _, mark, behind = text.rpartition("\x01")
    if not mark:
        raise UserError(
            "the tokenizer's chat template leaves out earlier answers; several turns need one that keeps them"
        )
    ids = list(tokenizer.encode(behind, add_special_tokens=False))
    if answered and ids and answered[-1] == ids[0]:
        del ids[0]
    return ids
