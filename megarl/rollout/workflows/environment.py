"""Episodes in an environment: the policy answers, the environment acts on the answer and returns an observation."""

from __future__ import annotations

from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from megarl.environments.base import Message
from megarl.environments.pool import EnvironmentFault, EnvironmentPool, Playing
from megarl.knobs import UserError
from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.conversation import ChatTemplate, Conversation
from megarl.rollout.reward_call import RewardFn, call_reward, failure_of
from megarl.rollout.sampling_seeds import gather_apart
from megarl.rollout.transcript import Transcript, pad_samples
from megarl.rollout.workflows.tool_use import tool_role
from megarl.types import GenerationHyperparameters, Reward, RewardError

MAX_REWARD = float(torch.finfo(torch.float32).max)


class EnvironmentWorkflow(RolloutWorkflow):
    """Plays `gconfig.n_samples` episodes of a row, each of at most `max_turns` answers, in environments of `pool`.

    All answers are trained on: as one sequence, or in several where the chat template rewrites earlier turns
    (`rollout/conversation.py`). What the environment says is only read. An episode ends when the environment is done,
    or where the sequence has no room for another answer. Its reward is the sum of the environment's rewards. If there
    is none, `reward_fn` scores the last answer; its data holds `transcript`, the text of the episode as the model read
    it last. An environment that fails costs its episode: the sample is masked and counted.
    """

    def __init__(
        self, pool: EnvironmentPool, reward_fn: RewardFn, gconfig: GenerationHyperparameters, tokenizer: Any
    ) -> None:
        self.pool = pool
        self.reward_fn = reward_fn
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.role = tool_role(tokenizer)
        self._template = ChatTemplate(tokenizer, **({"tools": pool.tools} if pool.tools else {}))

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor]:
        episodes = await gather_apart(self._episode(engine, data) for _ in range(self.gconfig.n_samples))
        return pad_samples([held.segments for held, _ in episodes], [reward for _, reward in episodes])

    async def _episode(self, engine: InferenceEngine, data: dict[str, Any]) -> tuple[Conversation, float | RewardError]:
        conversation = Conversation(self._template)
        try:
            async with self.pool.lend() as playing:
                return conversation, await self._play(engine, data, playing, conversation)
        except EnvironmentFault as error:
            if not conversation.segments:
                conversation.segments.append(Transcript())
                conversation.segments[0].give([self.tokenizer.eos_token_id or 0])  # masked, so that it is counted
            kind = self.pool.config.kind
            return conversation, failure_of(f"the environment {kind}", RewardError(f"the environment {kind}: {error}"))

    async def _play(
        self, engine: InferenceEngine, data: dict[str, Any], playing: Playing, conversation: Conversation
    ) -> float | RewardError:
        """Plays one episode, writes it to `conversation` and returns its reward."""
        limit, rewards = engine.max_sequence_tokens, []
        messages = self._readable(await playing.reset(data))
        try:
            request = conversation.begin(messages, self.gconfig, limit)
        except (TemplateError, TypeError, UserError) as error:
            raise _lied("reset()", error) from error
        for turn in range(1, self.pool.config.max_turns + 1):
            response = await engine.agenerate(request)
            conversation.sample(response)
            text = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            step = await playing.step(text)
            rewards.append(step.reward)
            if step.done:
                break
            turns = self._readable(list(step.observation or ()))  # type: ignore[arg-type]
            following = None
            if turn < self.pool.config.max_turns:
                try:
                    following = conversation.ask(turns, self.gconfig, limit)
                except (TemplateError, TypeError) as error:
                    raise _lied("step()", error) from error
            if following is None:
                rewards.append(await playing.end())
                break
            request = following
        given = [reward for reward in rewards if reward is not None]
        if given:
            total = sum(given)
            if not abs(total) <= MAX_REWARD:
                raise EnvironmentFault(f"the episode's rewards add to {total:g}, which float32 does not hold", "lied")
            return Reward(total, [total])
        (reward,) = await call_reward(
            self.reward_fn,
            self.tokenizer.decode(request.input_ids),
            request.input_ids,
            [text],
            [response.output_tokens],
            {**data, "transcript": self.tokenizer.decode(conversation.tokens)},
        )
        if isinstance(reward, RewardError) or not self.pool.config.gives_rewards:
            return reward
        return Reward(reward, [reward])  # one column, as of the episodes that have the environment's rewards

    def _readable(self, messages: list[Message]) -> list[Message]:
        """Messages in the roles that the template knows."""
        return [{**message, "role": self.role} if message["role"] == "tool" else message for message in messages]


def _lied(call: str, error: Exception) -> EnvironmentFault:
    """Fault of an environment whose messages are too long for the sequence, or refused by the chat template."""
    return EnvironmentFault(f"{call} gave messages that cannot be read: {error}", "lied")
