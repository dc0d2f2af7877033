"""Several tries at one problem: after a wrong answer the model is told so and answers again, for a smaller reward."""

from __future__ import annotations

import asyncio
from typing import Any

from torch import Tensor

from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.judge import RewardFn, judge
from megarl.rollout.transcript import Transcript, pad_transcripts, prompt_ids, turn_ids
from megarl.types import GenerationHyperparameters, ModelRequest, RewardError

FEEDBACK = "That is not right. Try again."


class MultiTurnWorkflow(RolloutWorkflow):
    """`gconfig.n_samples` conversations, each of at most `max_turns` answers.

    An answer whose reward is at least `good_enough` ends the conversation; otherwise `feedback` is its next user turn.
    The conversation's reward is that of its last answer times `turn_discount` for every turn before it. All answers are
    trained on, as one sequence.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int = 3,
        turn_discount: float = 0.9,
        good_enough: float = 1.0,
        feedback: str = FEEDBACK,
    ):
        self.reward_fn = reward_fn
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.good_enough = good_enough
        self.feedback = feedback

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor]:
        done = await asyncio.gather(*(self._converse(engine, data) for _ in range(self.gconfig.n_samples)))
        return pad_transcripts([transcript for transcript, _ in done], [reward for _, reward in done])

    async def _converse(self, engine: InferenceEngine, data: dict[str, Any]) -> tuple[Transcript, float | RewardError]:
        transcript = Transcript()
        transcript.give(prompt_ids(self.tokenizer, data["messages"]))
        discount, reward = 1.0, 0.0
        for turn in range(self.max_turns):
            asked = list(transcript.tokens)
            response = await engine.agenerate(ModelRequest(input_ids=asked, gconfig=self.gconfig))
            transcript.sample(response)
            text = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            prompt = self.tokenizer.decode(asked)
            (found,) = await judge(self.reward_fn, prompt, asked, [text], [response.output_tokens], data)
            if isinstance(found, RewardError):
                return transcript, found
            reward = found
            if reward >= self.good_enough or turn == self.max_turns - 1:
                break
            transcript.give(
                turn_ids(self.tokenizer, response.output_tokens, [{"role": "user", "content": self.feedback}])
            )
            discount *= self.turn_discount
        return transcript, reward * discount
