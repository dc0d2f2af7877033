"""Tool use: the model calls tools in its answer, reads what they return, and goes on until it answers without a call.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen's and Hermes' templates have it; results
come back in a turn of the role `tool`, or of `user` where the template has no such role.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from torch import Tensor

from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.judge import RewardFn, judge
from megarl.rollout.transcript import Transcript, pad_transcripts, prompt_ids, turn_ids
from megarl.rollout.workflows.tools import Tool
from megarl.types import GenerationHyperparameters, ModelRequest, RewardError

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MAX_RESULT = 4096  # characters of a tool's result that the model reads


class ToolWorkflow(RolloutWorkflow):
    """`gconfig.n_samples` conversations, each with at most `max_turns` answers, of which all but the last call tools.

    The reward function sees the last answer, with `transcript` (the whole conversation's text) among the data.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        tools: Sequence[Tool],
        max_turns: int = 4,
    ):
        self.reward_fn = reward_fn
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.tools = {tool.name: tool for tool in tools}
        self.max_turns = max_turns
        self.role = _tool_role(tokenizer)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor]:
        done = await asyncio.gather(*(self._converse(engine, data) for _ in range(self.gconfig.n_samples)))
        return pad_transcripts([transcript for transcript, _ in done], [reward for _, reward in done])

    async def _converse(self, engine: InferenceEngine, data: dict[str, Any]) -> tuple[Transcript, float | RewardError]:
        transcript, schemas = Transcript(), [tool.schema for tool in self.tools.values()]
        transcript.give(prompt_ids(self.tokenizer, data["messages"], tools=schemas))
        for turn in range(self.max_turns):
            asked = list(transcript.tokens)
            response = await engine.agenerate(ModelRequest(input_ids=asked, gconfig=self.gconfig))
            transcript.sample(response)
            text = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            calls = _CALL.findall(text)
            if not calls or turn == self.max_turns - 1:
                break
            results = await asyncio.gather(*(asyncio.to_thread(self.call, call) for call in calls))
            turns = [{"role": self.role, "content": result} for result in results]
            transcript.give(turn_ids(self.tokenizer, response.output_tokens, turns))
        whole = self.tokenizer.decode(transcript.tokens)
        (reward,) = await judge(
            self.reward_fn,
            self.tokenizer.decode(asked),
            asked,
            [text],
            [response.output_tokens],
            {**data, "transcript": whole},
        )
        return transcript, reward

    def call(self, text: str) -> str:
        """What the tool of one call answers; a call that cannot be made is answered with why."""
        try:
            asked = json.loads(text)
            name, arguments = asked["name"], asked.get("arguments", {})
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError, RecursionError):
            return 'error: a call is {"name": ..., "arguments": {...}}'
        if name not in self.tools:
            return f"error: there is no tool {name}; there are {', '.join(self.tools)}"
        tool = self.tools[name]
        if not isinstance(arguments, dict) or set(arguments) != set(tool.parameters):
            return f"error: {name} takes {', '.join(tool.parameters)}"
        return tool.run(**{key: str(value) for key, value in arguments.items()})[:MAX_RESULT]


def _tool_role(tokenizer: Any) -> str:
    """The role in which results come back: `tool` where the template knows it."""
    if not tokenizer.chat_template:
        return "user"
    try:
        turn_ids(tokenizer, [], [{"role": "tool", "content": "x"}])
    except TemplateError:
        return "user"
    return "tool"
