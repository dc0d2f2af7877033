"""Several tries at one problem: after a wrong answer the model is told so and answers again, for a smaller reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megarl.knobs import MAX_WEIGHT, UserError, check_ranges, knob
from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.conversation import ChatTemplate, Conversation
from megarl.rollout.reward_call import RewardFn, call_reward
from megarl.rollout.sampling_seeds import gather_apart
from megarl.rollout.transcript import pad_samples
from megarl.types import GenerationHyperparameters, Reward, RewardError


@dataclass(frozen=True)
class MultiTurnConfig:
    """Several tries at one problem, with feedback between them."""

    max_turns: int = knob(3, "most answers of a conversation", least=1, most=10_000)
    turn_discount: float = knob(
        0.9, "the reward is multiplied by this for every answer before the last", least=0, most=1
    )
    good_enough: float = knob(
        1.0, "an answer of at least this reward ends the conversation", least=-MAX_WEIGHT, most=MAX_WEIGHT
    )
    feedback: str = knob("That is not right. Try again.", "the user's turn after an answer of a smaller reward")

    def __post_init__(self) -> None:
        check_ranges(self, "rollout.multi_turn")
        if not self.feedback.strip():
            raise UserError("rollout.multi_turn.feedback is empty; say what the model reads after a wrong answer")


class MultiTurnWorkflow(RolloutWorkflow):
    """Holds `gconfig.n_samples` conversations, each of at most `config.max_turns` answers.

    An answer whose reward is at least `config.good_enough` ends the conversation; otherwise `config.feedback` is its
    next user turn. A conversation also ends where the sequence has no room for another answer. Its reward is the last
    answer's, times `config.turn_discount` for every answer before. All answers are trained on: as one sequence, or in
    several where the chat template rewrites earlier turns (`rollout/conversation.py`).
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        config: MultiTurnConfig | None = None,
    ):
        self.reward_fn = reward_fn
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.config = config or MultiTurnConfig()
        self._template = ChatTemplate(tokenizer)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor]:
        conversations = await gather_apart(self._converse(engine, data) for _ in range(self.gconfig.n_samples))
        return pad_samples([held.segments for held, _ in conversations], [reward for _, reward in conversations])

    async def _converse(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> tuple[Conversation, float | RewardError]:
        limit, discount = engine.max_sequence_tokens, 1.0
        conversation = Conversation(self._template)
        request = conversation.begin(data["messages"], self.gconfig, limit)
        reward: float | RewardError = 0.0
        for turn in range(1, self.config.max_turns + 1):
            response = await engine.agenerate(request)
            conversation.sample(response)
            text = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            prompt, ids = self.tokenizer.decode(request.input_ids), [response.output_tokens]
            (reward,) = await call_reward(self.reward_fn, prompt, request.input_ids, [text], ids, data)
            if isinstance(reward, RewardError) or reward >= self.config.good_enough or turn == self.config.max_turns:
                break
            feedback = [{"role": "user", "content": self.config.feedback}]
            following = conversation.ask(feedback, self.gconfig, limit)
            if following is None:
                break
            request, discount = following, discount * self.config.turn_discount
        return conversation, _scaled(reward, discount)


def _scaled(reward: float | RewardError, factor: float) -> float | RewardError:
    """A reward times `factor`; the parts of a weighted sum are scaled with it."""
    if isinstance(reward, RewardError):
        return reward
    if isinstance(reward, Reward):
        return Reward(reward * factor, [part * factor for part in reward.parts])
    return reward * factor
