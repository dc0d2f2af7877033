"""Conversations as exchanged token ids: sampled text is never tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.knobs import UserError
from megarl.rollout.client.routes import continued
from megarl.types import ROUTED_EXPERTS, GenerationHyperparameters, ModelRequest, ModelResponse, Reward, RewardError

MIN_ANSWER = 8  # tokens; SGLang refuses prompts within 6 tokens of its context (srt/managers/tp_worker.py)


@dataclass
class Transcript:
    """One conversation, token by token.

    `sampled` marks the tokens that the model wrote, which are trained on. Tokens that it only read have the behaviour
    log-prob 0 and the weight version -1. `routes` has the experts of each token that a server has read, int16
    `[tokens read, sparse layers, topk]`; None if servers do not send them.
    """

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Tensor | None = None

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
        """Appends the model's answer to the tokens so far. Tokens that have a route keep it."""
        self.routes = continued(self.routes, response.routed_experts)
        self.tokens += response.output_tokens
        self.sampled += [True] * response.output_len
        self.logprobs += response.output_logprobs
        self.versions += response.output_versions

    def ask(
        self, turn: Sequence[int], gconfig: GenerationHyperparameters, max_sequence_tokens: int | None
    ) -> ModelRequest | None:
        """Appends `turn`, which the model reads, and returns the request for its next answer.

        The answer may have `gconfig.max_new_tokens`, or as many as `max_sequence_tokens` leaves. Returns None, and
        appends nothing, if that is less than both `gconfig.max_new_tokens` and MIN_ANSWER.
        """
        max_new_tokens = gconfig.max_new_tokens
        if max_sequence_tokens is not None:
            free = max_sequence_tokens - len(self.tokens) - len(turn)
            if free < min(MIN_ANSWER, max_new_tokens):
                return None
            max_new_tokens = min(max_new_tokens, free)
        self.give(turn)
        limits = {"max_new_tokens": max_new_tokens, "min_new_tokens": min(gconfig.min_new_tokens, max_new_tokens)}
        return ModelRequest(input_ids=list(self.tokens), gconfig=gconfig.new(n_samples=1, **limits))

    def copy(self) -> Transcript:
        """A copy that can be continued independently."""
        return Transcript(list(self.tokens), list(self.sampled), list(self.logprobs), list(self.versions), self.routes)


def begin(
    prompt: Sequence[int], gconfig: GenerationHyperparameters, max_sequence_tokens: int | None
) -> tuple[Transcript, ModelRequest]:
    """Begins a conversation with `prompt`; also returns the request for its first answer.

    Raises:
        UserError: the prompt leaves no room for an answer.
    """
    transcript = Transcript()
    request = transcript.ask(prompt, gconfig, max_sequence_tokens)
    if request is None:
        raise no_room(prompt, max_sequence_tokens)
    return transcript, request


def no_room(prompt: Sequence[int], max_sequence_tokens: int | None) -> UserError:
    """The error of a first prompt that leaves no room for an answer."""
    return UserError(
        f"a prompt has {len(prompt)} tokens of at most {max_sequence_tokens} in a sequence, which leaves no room "
        "for an answer; lower train_dataset.max_length, or raise actor.max_tokens_per_mb up to the model's context"
    )


def pad_samples(samples: Sequence[Sequence[Transcript]], rewards: Sequence[float | RewardError]) -> dict[str, Tensor]:
    """`pad_transcripts` of samples that consist of several segments, with one reward for each sample.

    Segments of a sample are next to each other, in their order, and have its reward and number in `sample_ids` int64
    `[n]`. A segment without a sampled token is left out, unless its sample has no other.
    """
    if len(samples) != len(rewards):
        raise ValueError(f"{len(samples)} samples need as many rewards, got {len(rewards)}")
    segments: list[Transcript] = []
    owners: list[int] = []
    for index, sample in enumerate(samples):
        kept = [segment for segment in sample if any(segment.sampled)] or list(sample[-1:])
        segments += kept
        owners += [index] * len(kept)
    padded = pad_transcripts(segments, [rewards[owner] for owner in owners])
    return {**padded, "sample_ids": torch.tensor(owners)}


def pad_transcripts(transcripts: Sequence[Transcript], rewards: Sequence[float | RewardError]) -> dict[str, Tensor]:
    """Packs conversations and their rewards `[n]` into the padded dict that a workflow returns.

    `[n, length]`, padded on the right: `input_ids` int64; `attention_mask` bool; `loss_mask` bool, true on sampled
    tokens; `rollout_logprobs` float32, 0 on given tokens; `versions` int32, -1 on given tokens. `[n]`: `rewards`
    float32; `reward_failed` bool, true where the reward is a `RewardError`: such a sample has reward 0 and no token in
    its `loss_mask`. `reward_columns` float32 `[n, k]`, where the rewards are sums of several. `routed_experts` int16
    `[n, length, sparse layers, topk]`, where servers send them, -1 on tokens that none has read.
    """
    if len(transcripts) != len(rewards):
        raise ValueError(f"{len(transcripts)} responses need as many rewards, got {len(rewards)}")

    longest = max(len(t.tokens) for t in transcripts)

    def padded(rows: list[list[Any]], dtype: Any, fill: float) -> Tensor:  # numpy reads lists 4 times as fast as torch
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
        zeros = (0.0,) * len(parts[0])
        result["reward_columns"] = torch.tensor([getattr(reward, "parts", zeros) for reward in rewards])
    known = next((t.routes for t in transcripts if t.routes is not None), None)
    if known is not None:
        routes = known.new_full((len(transcripts), longest, *known.shape[1:]), -1)
        for row, transcript in zip(routes, transcripts, strict=True):
            if transcript.routes is not None:
                row[: len(transcript.routes)] = transcript.routes
        result[ROUTED_EXPERTS] = routes
    return result


def pad_responses(responses: Sequence[ModelResponse], rewards: Sequence[float | RewardError]) -> dict[str, Tensor]:
    """`pad_transcripts` of single completions and their rewards."""
    return pad_transcripts([Transcript.of(response) for response in responses], rewards)


def prompt_ids(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    """Token ids of the chat template up to the model's answer.

    A base model's tokenizer has no template: then the ids of the plain text. `options` go to the template, such as
    `tools` or `enable_thinking`.
    """
    if not tokenizer.chat_template:
        return list(tokenizer.encode("".join(str(message["content"]) for message in messages)))
    return list(
        tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=True, return_dict=False, **options
        )
    )


def turn_ids(tokenizer: Any, answered: Sequence[int], turns: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    """Token ids that bring a conversation from the answer `answered` through `turns` to the next answer.

    They are the template's text after an assistant's message. The end-of-turn token is not repeated if the answer
    itself ended with it.

    Raises:
        UserError: the template rewrites earlier messages, so a conversation cannot be continued token by token.
    """
    if not tokenizer.chat_template:
        return list(tokenizer.encode("".join(str(turn["content"]) for turn in turns)))
    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\x01"}]
    text = tokenizer.apply_chat_template(
        [*before, *turns], tokenize=False, add_generation_prompt=True, return_dict=False, **options
    )
    _, mark, continuation = text.rpartition("\x01")
    if not mark:
        raise UserError(
            "the tokenizer's chat template leaves out earlier answers; several turns need one that keeps them"
        )
    ids = list(tokenizer.encode(continuation, add_special_tokens=False))
    if answered and ids and answered[-1] == ids[0]:
        del ids[0]
    return ids
