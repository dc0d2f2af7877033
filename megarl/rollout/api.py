"""The two interfaces of rollout: an engine that answers requests, a workflow that turns a prompt into training data."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.rollout.together import together
from megarl.types import ModelRequest, ModelResponse, PackedBatch


class GenerationError(RuntimeError):
    """No completion was generated. Names the server and its answer. `fatal`: no server is left."""

    def __init__(self, message: str, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


class RequestRefused(GenerationError):
    """A server answered 4xx: the request itself is at fault, and a retry would not help."""


class InferenceEngine(abc.ABC):
    """Generates completions and knows which version of the policy weights it serves."""

    vocab_size: int | None = None  # of the policy; a sample with a token outside is left out
    max_sequence_tokens: int | None = None  # prompt and answers; servers and trainer take no longer sequence

    @abc.abstractmethod
    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One completion of `req.input_ids`. `req.gconfig.n_samples` is for `agenerate_group` and is ignored."""

    async def agenerate_group(self, req: ModelRequest) -> list[ModelResponse]:
        """`req.gconfig.n_samples` completions of `req.input_ids`, returned together."""
        return await together(self.agenerate(req) for _ in range(req.gconfig.n_samples))

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Tells the engine that the servers now hold the trainer's weights of step `version`."""

    @abc.abstractmethod
    def get_version(self) -> int:
        """The version last set; 0 at the start."""

    @abc.abstractmethod
    def rollout_batch(self, data: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow) -> PackedBatch:
        """Runs one episode per item of `data` at once and returns their groups in the order of `data`."""


class RolloutWorkflow(abc.ABC):
    """Turns one prompt into training data: the class that users write."""

    @abc.abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Runs one episode on one item of the data set.

        Returns a padded dict or TensorDict `[n_samples, length]` with `input_ids`, `attention_mask`, `loss_mask` and
        `rewards`, best also `rollout_logprobs` and `versions`; or None to reject the prompt.
        """

    async def aclose(self) -> None:  # noqa: B027 - most workflows hold nothing
        """Releases what the workflow holds, such as an HTTP endpoint. The engine calls it when it is destroyed."""
