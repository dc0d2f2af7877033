"""ReMax: rewards of a sampled group minus the reward of the greedy completion (arXiv 2310.10505)."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from torch import Tensor

from megarl.rollout.api import InferenceEngine
from megarl.rollout.reward_call import call_reward
from megarl.rollout.together import together
from megarl.rollout.transcript import pad_responses, prompt_ids
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.types import ModelRequest, RewardError


class ReMaxRLVRWorkflow(RLVRWorkflow):
    """`RLVRWorkflow` with `reward - reward of the greedy completion`; the greedy one is not trained on.

    If the greedy completion cannot be scored, the whole group is masked: it has no baseline.
    """

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor]:
        input_ids = prompt_ids(self.tokenizer, data["messages"], enable_thinking=self.enable_thinking)
        sampled = ModelRequest(input_ids=input_ids, gconfig=self.gconfig)
        greedy = ModelRequest(input_ids=input_ids, gconfig=self.gconfig.new(greedy=True))
        asked: list[Awaitable[Any]] = [engine.agenerate_group(sampled), engine.agenerate(greedy)]
        responses, greedy_response = await together(asked)
        prompt = self.tokenizer.decode(input_ids)
        all_responses = [*responses, greedy_response]
        completions = [self.tokenizer.decode(r.output_tokens, skip_special_tokens=True) for r in all_responses]
        ids = [r.output_tokens for r in all_responses]
        *rewards, baseline = await call_reward(self.reward_fn, prompt, input_ids, completions, ids, data)
        if isinstance(baseline, RewardError):
            return pad_responses(responses, [baseline] * len(responses))
        return pad_responses(responses, [r if isinstance(r, RewardError) else r - baseline for r in rewards])
