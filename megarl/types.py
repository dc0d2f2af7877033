"""Types that pass between the stages: generation requests and responses, episodes, packed batches."""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megarl.device_copies import HoldsTensors, to_device
from megarl.knobs import MAX_COUNT, UserError, check_ranges, knob


@dataclass(frozen=True)
class GenerationHyperparameters:
    """Sampling parameters, read by the workflows and the rollout client."""

    n_samples: int = knob(1, "completions sampled per prompt (the group size)", least=1, most=MAX_COUNT)
    max_new_tokens: int = knob(256, "maximum tokens of a completion", least=1, most=MAX_COUNT)
    min_new_tokens: int = knob(0, "minimum tokens before an end-of-sequence token is allowed", least=0, most=MAX_COUNT)
    greedy: bool = knob(False, "take the most likely token instead of sampling")
    temperature: float = knob(
        1.0, "softmax temperature; log-probs are taken from the tempered distribution", above=0, most=100
    )
    top_p: float = knob(
        1.0, "nucleus sampling mass; below 1 rollout log-probs no longer match the trainer's", above=0, most=1
    )
    top_k: int = knob(-1, "sample among the k most likely tokens; -1 means all", least=-1, most=MAX_COUNT)
    stop: list[str] = knob(meaning="strings that end a completion", factory=list)
    stop_token_ids: list[int] = knob(
        meaning="token ids that end a completion, besides eos", factory=list, least=0, most=2**31 - 1
    )

    def __post_init__(self) -> None:
        check_ranges(self, "gconfig")
        if self.top_k == 0:
            raise UserError("gconfig.top_k=0 must be -1, for all tokens, or at least 1")
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"gconfig.min_new_tokens={self.min_new_tokens} must be at most gconfig.max_new_tokens="
                f"{self.max_new_tokens}; change one of them"
            )
        if "" in self.stop:
            raise UserError("gconfig.stop holds an empty string, which every completion ends with; leave it out")

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Returns a copy with some fields changed, such as `gconfig.new(greedy=True)`."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class ModelRequest:
    """A request to an inference engine for one completion."""

    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        input_ids: Any = self.input_ids
        if isinstance(input_ids, Mapping):  # apply_chat_template returns a mapping by default
            object.__setattr__(self, "input_ids", list(input_ids["input_ids"]))


@dataclass(frozen=True)
class ModelResponse:
    """One completion, with the id, behaviour log-prob and weight version of each output token."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: Literal["stop", "length", "abort"] = "stop"
    routed_experts: Tensor | None = None  # int16 [input_len + output_len - 1, layers with experts, topk]

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


class Reward(float):
    """Weighted sum of several rewards; `parts` holds the values before weighting, NaN where one does not apply."""

    parts: tuple[float, ...]

    def __new__(cls, total: float, parts: Sequence[float]) -> Reward:
        reward = super().__new__(cls, total)
        reward.parts = tuple(parts)
        return reward


class RewardError(RuntimeError):
    """Raised if a completion cannot be scored. Its sample is masked and counted, and never gets a reward of 0."""


class PackedBatch(HoldsTensors):
    """Sequences packed end to end without padding: the only batch type after rollout.

    `tokens[key]` is `[total_tokens, ...]`, mostly 1-D, `sequences[key]` is `[num_seqs, ...]`, `cu_seqlens` is int32
    `[num_seqs + 1]`. Per-token values are token-aligned: `rollout_logprobs[i]` is the log-prob *of* token i. Nothing
    predicts a sequence's first token, so its value is 0. Reads like a mapping: `batch["input_ids"]`.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        tokens: Mapping[str, Tensor],
        sequences: Mapping[str, Tensor] | None = None,
        bounds: Sequence[int] | None = None,
    ):
        """`bounds` are the values of `cu_seqlens`, if the caller has them: reading them waits for the device."""
        self.shared = False  # True: known to be the same on every rank, as after a broadcast
        self.cu_seqlens = cu_seqlens.to(torch.int32)
        self.bounds: Sequence[int] = self.cu_seqlens.tolist() if bounds is None else bounds
        self.tokens: dict[str, Tensor] = {}
        self.sequences: dict[str, Tensor] = {}
        for key, value in tokens.items():
            self.set_tokens(key, value)
        for key, value in (sequences or {}).items():
            self.set_sequences(key, value)

    @property
    def num_seqs(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def total_tokens(self) -> int:
        return self.bounds[-1]

    def split(self, values: Tensor) -> list[Tensor]:
        """Splits `values` `[total_tokens, ...]` by sequence."""
        return list(values.split([stop - start for start, stop in itertools.pairwise(self.bounds)]))

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, int64 `[num_seqs]`."""
        return self.cu_seqlens.diff().long()

    @property
    def samples(self) -> Tensor:
        """Index of the sample of each sequence, int64 `[num_seqs]`, counted from 0 in order of first appearance.

        Sequences with equal `sample_ids` and equal `group_ids` are segments of one sample: a conversation whose history
        was rewritten. Without `sample_ids` every sequence is a sample.
        """
        if "sample_ids" not in self:
            return torch.arange(self.num_seqs)
        ids = self["sample_ids"].cpu()
        groups = self["group_ids"].cpu() if "group_ids" in self else torch.zeros_like(ids)
        _, index = torch.stack((groups, ids), 1).unique(dim=0, return_inverse=True)
        order = torch.arange(self.num_seqs)
        firsts = torch.full((self.num_seqs,), self.num_seqs).scatter_reduce(0, index, order, "amin")
        return firsts.argsort(stable=True).argsort()[index]

    @property
    def owners(self) -> Tensor:
        """Index of the sample of each token, int64 `[total_tokens]`; see `samples`."""
        return torch.repeat_interleave(self.samples, self.lengths)

    @property
    def num_samples(self) -> int:
        return int(self.samples.max()) + 1 if self.num_seqs else 0

    def of_samples(self, key: str) -> Tensor:
        """Values of `key` per sample, `[num_samples, ...]`; all segments of a sample have one value.

        Raises:
            UserError: the batch has a value of each token.
        """
        if key in self.tokens:
            raise UserError(
                f"{key} has a value for each token, and this needs one for each sequence: return it as [n_samples]"
            )
        samples = self.samples
        order = torch.arange(self.num_seqs)
        firsts = torch.full((self.num_samples,), self.num_seqs).scatter_reduce(0, samples, order, "amin")
        return self[key][firsts]

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    def set_tokens(self, key: str, value: Tensor) -> None:
        """Sets a per-token tensor, `[total_tokens]` or `[total_tokens, ...]`."""
        if value.shape[:1] != (self.total_tokens,):
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}, a per-token tensor of this batch has ({self.total_tokens},)"
            )
        self.tokens[key] = value

    def set_sequences(self, key: str, value: Tensor) -> None:
        """Sets a per-sequence tensor, `[num_seqs, ...]`."""
        if value.ndim == 0 or value.shape[0] != self.num_seqs:
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}, a per-sequence tensor of this batch has ({self.num_seqs}, ...)"
            )
        self.sequences[key] = value

    def __contains__(self, key: object) -> bool:
        return key in self.tokens or key in self.sequences

    def __getitem__(self, key: str) -> Tensor:
        if key == "cu_seqlens":
            return self.cu_seqlens
        if key in self.tokens:
            return self.tokens[key]
        if key in self.sequences:
            return self.sequences[key]
        raise KeyError(f"{key}: this batch holds {sorted([*self.tokens, *self.sequences])}")

    def __setitem__(self, key: str, value: Tensor) -> None:
        """Sets a per-token tensor if the shape is `[total_tokens]`, else a per-sequence one. A key keeps its kind."""
        if key in self.sequences or (key not in self.tokens and value.shape != (self.total_tokens,)):
            self.set_sequences(key, value)
        else:
            self.set_tokens(key, value)

    def keys(self) -> list[str]:
        return [*self.tokens, *self.sequences]

    def to(self, device: torch.device | str) -> PackedBatch:
        """Returns the batch with every tensor on `device`. Does not wait for a GPU to receive them."""
        return to_device(self, device)

    def token_index(self, indices: Sequence[int]) -> Tensor:
        """Positions of all tokens of the sequences `indices`, in that order, int64."""
        index = torch.as_tensor(list(indices), dtype=torch.long, device=self.device)
        lengths = self.lengths[index]
        shift = self.cu_seqlens[:-1].long()[index] - (lengths.cumsum(0) - lengths)  # old start minus new start
        return torch.arange(int(lengths.sum()), device=self.device) + shift.repeat_interleave(lengths)

    def select(self, indices: Sequence[int]) -> PackedBatch:
        """Returns a batch of the sequences `indices`, in that order."""
        tokens = self.token_index(indices)
        index = torch.as_tensor(list(indices), dtype=torch.long, device=self.device)
        return PackedBatch(
            cu_seqlens_of(self.lengths[index]),
            {k: v[tokens] for k, v in self.tokens.items()},
            {k: v[index] for k, v in self.sequences.items()},
        )

    @staticmethod
    def concat(batches: Iterable[PackedBatch]) -> PackedBatch:
        """Concatenates batches. All must hold the same keys."""
        parts = list(batches)
        if not parts:
            raise ValueError("concat needs at least one batch, got none")
        first = parts[0]
        for other in parts[1:]:
            if set(other.keys()) != set(first.keys()):
                raise ValueError(
                    f"batches hold different keys: {sorted(first.keys())} and {sorted(other.keys())}; "
                    "a workflow must return the same keys for every episode"
                )
        return PackedBatch(
            cu_seqlens_of(torch.cat([p.lengths for p in parts])),
            {k: torch.cat([p.tokens[k] for p in parts]) for k in first.tokens},
            {k: torch.cat([p.sequences[k] for p in parts]) for k in first.sequences},
        )

    @staticmethod
    def from_padded(data: Any) -> PackedBatch:
        """Packs a padded `{key: [batch, length]}` mapping (dict or TensorDict) by its `attention_mask`.

        Values of shape `[batch, length]` become per-token tensors, and so does `routed_experts [batch, length, ...]`.
        Others with a leading `batch` become per-sequence ones. If the batch has one sequence, a tensor may lack the
        batch dimension. Padding may be on either side.
        """
        if isinstance(data, PackedBatch):
            return data
        if "input_ids" not in data:
            raise UserError(f"a batch needs 'input_ids' [batch, length], got the keys {sorted(data.keys())}")
        shape = data["input_ids"].shape
        if len(shape) != 2:
            raise UserError(f"input_ids has shape {tuple(shape)}, a padded batch has [batch, length]")
        mask = data["attention_mask"].bool() if "attention_mask" in data else torch.ones(shape, dtype=torch.bool)
        if mask.shape != shape:
            raise UserError(f"attention_mask has shape {tuple(mask.shape)}, input_ids has {tuple(shape)}")
        kept_positions = mask.flatten().nonzero().squeeze(1)
        tokens, sequences = {}, {}
        for key, value in data.items():
            if key == "attention_mask":
                continue
            if shape[0] == 1 and value.shape[:1] != (1,):
                value = value.unsqueeze(0)
            if value.shape == shape:
                tokens[key] = value.take(kept_positions)
            elif key == ROUTED_EXPERTS and value.shape[:2] == shape:
                tokens[key] = value.flatten(0, 1)[kept_positions]
            elif value.ndim and value.shape[0] == shape[0]:
                sequences[key] = value
            else:
                raise UserError(
                    f"{key} has shape {tuple(value.shape)}, expected [{shape[0]}, {shape[1]}] or [{shape[0]}, ...]"
                )
        return PackedBatch(cu_seqlens_of(mask.sum(-1)), tokens, sequences)


def shifted_labels(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Labels of logits: the token that each position predicts, and True where that token is trained.

    Logits at position i predict token i + 1. So `loss_mask` is shifted with the tokens, and the last position of a
    sequence predicts nothing: its label is 0 and its mask False.

    Returns:
        labels, int64 `[total_tokens]`, and mask, bool `[total_tokens]`.
    """
    ends = batch.cu_seqlens[1:][batch.lengths > 0].long() - 1
    labels = batch["input_ids"].long().roll(-1).index_fill(0, ends, 0)
    return labels, batch["loss_mask"].bool().roll(-1).index_fill(0, ends, False)


ROUTED_EXPERTS = "routed_experts"  # int16 [total_tokens, sparse layers, topk] of a batch: experts to replay; -1: none
TEACHER_SAMPLED = "teacher_sampled"  # bool [num_seqs] of a batch: a teacher wrote the sample, not the policy
ORIGIN = "megarl_origin"  # key of a prompt's origin, {"source": label, "row": number}; workflows do not see it


def trained_tokens_of_samples(batch: PackedBatch) -> Tensor:
    """Counts the trained tokens of each sample, all its segments together, float32 `[num_samples]`."""
    owner = batch.owners
    return torch.zeros(batch.num_samples).index_add_(0, owner, batch["loss_mask"].float())


def rewards_of_samples(batch: PackedBatch) -> Tensor:
    """Rewards of the samples, float64 `[num_samples]`. Rewards of tokens are summed over their sample."""
    if "rewards" in batch.sequences:
        return batch.of_samples("rewards").double()
    owner = batch.owners
    return torch.zeros(batch.num_samples, dtype=torch.float64).index_add_(0, owner, batch["rewards"].double())


@dataclass(frozen=True)
class Episode:
    """Result of one workflow call: the packed group of one prompt, or the reason why there is none.

    `rewards` holds the measured rewards of a refused group.
    """

    prompt_id: str
    group: PackedBatch | None
    reason: str = ""
    dropped: dict[str, int] = field(default_factory=dict)  # number of samples left out of the group, by reason
    origin: dict[str, Any] = field(default_factory=dict)  # source and row of the prompt, if the loader gave them
    rewards: tuple[float, ...] = ()


class TokenMean(NamedTuple):
    """A metric that is a mean over tokens of a microbatch; the weight of the microbatch's loss does not count."""

    mean: Tensor  # scalar
    tokens: Tensor  # scalar, how many


Metrics = Mapping[str, Tensor | float | TokenMean]  # of a microbatch; those named `*_max` are maxima


def cu_seqlens_of(lengths: Tensor) -> Tensor:
    """Cumulative sequence lengths with a leading 0, int32 `[num_seqs + 1]`."""
    return torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0)).to(torch.int32)


@dataclass(frozen=True)
class WeightUpdateMeta:
    """Transport and version of one weight update to the rollout servers.

    `type` is the transport. `path` is the folder of the weight files for `disk`; the servers must see it too.
    `model_version` is the version that the servers serve after the update.
    """

    type: Literal["auto", "disk", "gloo", "nccl", "cuda_ipc", "nixl", "mooncake", "shm"]
    path: str | None = None
    model_version: int = 0

    def __post_init__(self) -> None:
        types = ("auto", "disk", "gloo", "nccl", "cuda_ipc", "nixl", "mooncake", "shm")
        if self.type not in types:
            raise UserError(f"WeightUpdateMeta(type={self.type!r}) is not one of {', '.join(types)}")
        if (self.type == "disk") != (self.path is not None):
            raise UserError(
                f"WeightUpdateMeta(type={self.type!r}, path={self.path!r}): disk needs a path, the others take none"
            )
        if self.model_version < 1:
            raise UserError(f"WeightUpdateMeta(model_version={self.model_version}) must be at least 1")


class WeightUpdates(Protocol):
    """Protocol of weight updates: the rollout engine expects a version, the training engine uploads it.

    Implemented by `reshard.session.WeightSession`.
    """

    def expect(self, meta: WeightUpdateMeta) -> Future[Any]:
        """Returns a future that completes once the servers serve `meta.model_version`, or raises the failure."""

    def upload(self, weights: Any, meta: WeightUpdateMeta) -> None:
        """Sends the weights of a training engine to the servers. A collective of the trainer ranks."""
