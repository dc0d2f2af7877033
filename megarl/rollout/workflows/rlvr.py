"""Reinforcement learning with verifiable rewards: sample a group of completions, let a function score each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.reward_call import RewardFn, call_reward
from megarl.rollout.transcript import pad_responses, prompt_ids
from megarl.types import GenerationHyperparameters, ModelRequest


class RLVRWorkflow(RolloutWorkflow):
    """Samples `gconfig.n_samples` completions of `data["messages"]` and scores each with `reward_fn`.

    `reward_fn(prompt, completions, prompt_ids, completion_ids, **data) -> float` may be sync or async. `prompt` is the
    chat as the model reads it, `completions` one completion's text without special tokens, the ids are lists of int.
    A completion that it cannot score is masked and counted (`rollout/reward_call.py`).
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool = False,
    ):
        self.reward_fn = reward_fn
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor]:
        input_ids = prompt_ids(self.tokenizer, data["messages"], enable_thinking=self.enable_thinking)
        request = ModelRequest(input_ids=input_ids, gconfig=self.gconfig)
        responses = await engine.agenerate_group(request)
        prompt = self.tokenizer.decode(input_ids)
        completions = [self.tokenizer.decode(r.output_tokens, skip_special_tokens=True) for r in responses]
        ids = [r.output_tokens for r in responses]
        rewards = await call_reward(self.reward_fn, prompt, input_ids, completions, ids, data)
        return pad_responses(responses, rewards)
