"""Episodes in an environment: the policy answers, the environment acts by the answer and says what comes next."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from jinja2 import TemplateError
from torch import Tensor

from megarl.environments.base import Message
from megarl.environments.pool import EnvironmentFault, EnvironmentPool, Playing
from megarl.knobs import UserError
from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.reward_call import RewardFn, call_reward, failure_of
from megarl.rollout.transcript import Transcript, begin, pad_transcripts, prompt_ids, turn_ids
from megarl.rollout.workflows.tool_use import tool_role
from megarl.types import GenerationHyperparameters, Reward, RewardError

logger = logging.getLogger(__name__)


class EnvironmentWorkflow(RolloutWorkflow):
    """Plays `gconfig.n_samples` episodes of a row, each of at most `max_turns` answers, in environments of `pool`.

    All answers are trained on, as one sequence; what the environment says is only read. An episode ends when the
    environment is done, or where the sequence has no room for another answer. Its reward is the sum of the
    environment's rewards. If there is none, `reward_fn` scores the last answer; its data holds `transcript`, the text
    of the whole episode. An environment that fails costs its episode: the sample is masked and counted.
    """

    def __init__(
        self, pool: EnvironmentPool, reward_fn: RewardFn, gconfig: GenerationHyperparameters, tokenizer: Any
    ) -> None:
        self.pool = pool
        self.reward_fn = reward_fn
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.role = tool_role(tokenizer)
        self._options = {"tools": pool.tools} if pool.tools else {}

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor]:
        episodes = await asyncio.gather(*(self._episode(engine, data) for _ in range(self.gconfig.n_samples)))
        return pad_transcripts([transcript for transcript, _ in episodes], [reward for _, reward in episodes])

    async def _episode(self, engine: InferenceEngine, data: dict[str, Any]) -> tuple[Transcript, float | RewardError]:
        transcript = Transcript()
        try:
            async with self.pool.lend() as playing:
                return transcript, await self._play(engine, data, playing, transcript)
        except EnvironmentFault as error:
            if not transcript.tokens:
                transcript.give([self.tokenizer.eos_token_id or 0])  # a masked sequence, so that it is counted
            kind = self.pool.config.kind
            return transcript, failure_of(f"the environment {kind}", RewardError(f"the environment {kind}: {error}"))

    async def _play(
        self, engine: InferenceEngine, data: dict[str, Any], playing: Playing, transcript: Transcript
    ) -> float | RewardError:
        """Plays one episode, writes it to `transcript` and returns its reward."""
        limit, rewards = engine.max_sequence_tokens, []
        messages = self._readable(await playing.reset(data))
        try:
            begun, request = begin(prompt_ids(self.tokenizer, messages, **self._options), self.gconfig, limit)
        except (TemplateError, TypeError, UserError) as error:
            raise _lied("reset()", error) from error
        transcript.give(begun.tokens)
        for turn in range(1, self.pool.config.max_turns + 1):
            response = await engine.agenerate(request)
            transcript.sample(response)
            text = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            step = await playing.step(text)
            rewards.append(step.reward)
            if step.done:
                break
            turns = self._readable(list(step.observation or ()))  # type: ignore[arg-type]
            following = None
            if turn < self.pool.config.max_turns:
                try:
                    ids = turn_ids(self.tokenizer, response.output_tokens, turns)
                except (TemplateError, TypeError) as error:  # a UserError blames the template, not the environment
                    raise _lied("step()", error) from error
                following = transcript.ask(ids, self.gconfig, limit)
            if following is None:
                rewards.append(await playing.end())
                break
            request = following
        given = [reward for reward in rewards if reward is not None]
        if given:
            return Reward(sum(given), [sum(given)])
        (reward,) = await call_reward(
            self.reward_fn,
            self.tokenizer.decode(request.input_ids),
            request.input_ids,
            [text],
            [response.output_tokens],
            {**data, "transcript": self.tokenizer.decode(transcript.tokens)},
        )
        if isinstance(reward, RewardError) or not self.pool.config.gives_rewards:
            return reward
        return Reward(reward, [reward])  # one column, as of the episodes that have the environment's rewards

    def _readable(self, messages: list[Message]) -> list[Message]:
        """Messages in the roles that the template knows."""
        return [{**message, "role": self.role} if message["role"] == "tool" else message for message in messages]


def _lied(call: str, error: Exception) -> EnvironmentFault:
    """The fault of messages that are too long for the sequence, or that the chat template refuses."""
    return EnvironmentFault(f"{call} gave messages that cannot be read: {error}", "lied")
