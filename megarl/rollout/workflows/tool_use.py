"""Tool use: the model calls tools in its answer, reads their results, and goes on until it answers without a call.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the format of Qwen's and Hermes' templates.
Results come back in a turn of the role `tool`, or of `user` where the template has no such role.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from torch import Tensor

from megarl.environments.tool_calls import CALL, CALL_ERROR, parse_call
from megarl.knobs import MAX_COUNT, MAX_SECONDS, UserError, check_ranges, does_not_exist, function_of, knob
from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.conversation import ChatTemplate, Conversation
from megarl.rollout.reward_call import RewardFn, call_reward
from megarl.rollout.sampling_seeds import gather_apart
from megarl.rollout.transcript import pad_samples, prompt_ids, turn_ids
from megarl.rollout.workflows.tools import Tool, calculator_tool, python_tool, search_tool
from megarl.sandbox import SandboxError, run_python
from megarl.types import GenerationHyperparameters, RewardError

logger = logging.getLogger(__name__)

BUILT_IN = ("calculator", "python", "search")


@dataclass(frozen=True)
class ToolUseConfig:
    """Tools that the model may call in its answers, and their limits."""

    tools: list[str] = knob(
        factory=lambda: ["calculator"],
        meaning="calculator, python, search, or MODULE.FUNCTION of your own that returns a Tool",
    )
    max_turns: int = knob(4, "most answers of a conversation; a call in the last one is not made", least=1, most=10_000)
    max_result_chars: int = knob(4096, "characters of a tool's result that the model reads", least=1, most=MAX_COUNT)
    python_time_limit_s: float = knob(
        5.0, "python: seconds of processor time that a program may use", above=0, most=MAX_SECONDS
    )
    python_memory_limit_mb: int = knob(512, "python: address space of a program, in MiB", least=64, most=2**24)
    corpus: str = knob("", "search: text file with one passage a line", path=True)
    search_results: int = knob(3, "search: passages in a result", least=1, most=MAX_COUNT)

    def __post_init__(self) -> None:
        check_ranges(self, "rollout.tool_use")
        if not self.tools:
            raise UserError("rollout.tool_use.tools is empty; name one at least, such as calculator")
        for name in self.tools:
            if name not in BUILT_IN and "." not in name:
                known = does_not_exist(f"rollout.tool_use.tools: {name}", name, BUILT_IN)
                raise UserError(f"{known}, and MODULE.FUNCTION of your own")

    def check(self) -> None:
        """Refuses a search tool without a corpus.

        Raises:
            UserError: no file is named, or it cannot be read.
        """
        if "search" in self.tools:
            self.passages()

    def passages(self) -> list[str]:
        """The lines of the corpus that are not empty.

        Raises:
            UserError: no file is named, it cannot be read, or holds no passage.
        """
        if not self.corpus:
            raise UserError("rollout.tool_use.tools: search needs rollout.tool_use.corpus=FILE, one passage a line")
        try:
            lines = Path(self.corpus).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"rollout.tool_use.corpus={self.corpus} cannot be read ({type(error).__name__}); give a text file with "
                "one passage a line"
            ) from error
        passages = [line for line in lines if line.strip()]
        if not passages:
            raise UserError(f"rollout.tool_use.corpus={self.corpus} holds no passage; write one a line")
        return passages


def tools_of(config: ToolUseConfig) -> list[Tool]:
    """The tools that the configuration names.

    Raises:
        UserError: a tool of the user's own cannot be imported or is no `Tool`, or this machine has no sandbox.
    """
    return [_tool_of(name, config) for name in config.tools]


def _tool_of(name: str, config: ToolUseConfig) -> Tool:
    if name == "calculator":
        return calculator_tool()
    if name == "search":
        return search_tool(config.passages(), config.search_results)
    if name == "python":
        try:
            run_python("")
        except SandboxError as error:
            raise UserError(f"rollout.tool_use.tools: python cannot run here ({error}); leave it out") from error
        return python_tool(config.python_time_limit_s, config.python_memory_limit_mb)
    tool = function_of(name, f"rollout.tool_use.tools: {name}")()
    if not isinstance(tool, Tool):
        raise UserError(
            f"rollout.tool_use.tools: {name}() returned a {type(tool).__name__}; return a "
            "megarl.rollout.workflows.tools.Tool"
        )
    return tool


class ToolWorkflow(RolloutWorkflow):
    """Holds `gconfig.n_samples` conversations, each with at most `config.max_turns` answers.

    All answers but the last call tools. A conversation also ends where the sequence has no room for another answer.
    The reward function sees the last answer; its data holds `transcript`, the text of the conversation as the model
    read it last. `tools` replaces the tools that `config` names.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        config: ToolUseConfig | None = None,
        tools: Sequence[Tool] | None = None,
    ):
        self.reward_fn = reward_fn
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.config = config or ToolUseConfig()
        self.tools = {tool.name: tool for tool in (tools_of(self.config) if tools is None else tools)}
        self.role = tool_role(tokenizer)
        schemas = [tool.schema for tool in self.tools.values()]
        self._template = ChatTemplate(tokenizer, tools=schemas)
        question = [{"role": "user", "content": "?"}]
        if prompt_ids(tokenizer, question, tools=schemas) == prompt_ids(tokenizer, question):
            logger.warning("the chat template does not describe tools to the model: describe them in the prompts")

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor]:
        conversations = await gather_apart(self._converse(engine, data) for _ in range(self.gconfig.n_samples))
        return pad_samples([held.segments for held, _ in conversations], [reward for _, reward in conversations])

    async def _converse(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> tuple[Conversation, float | RewardError]:
        limit = engine.max_sequence_tokens
        conversation = Conversation(self._template)
        request = conversation.begin(data["messages"], self.gconfig, limit)
        for turn in range(1, self.config.max_turns + 1):
            response = await engine.agenerate(request)
            conversation.sample(response)
            text = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            calls = CALL.findall(text)
            if not calls or turn == self.config.max_turns:
                break
            results = await asyncio.gather(*(asyncio.to_thread(self.call, call) for call in calls))
            turns = [{"role": self.role, "content": result} for result in results]
            following = conversation.ask(turns, self.gconfig, limit)
            if following is None:
                break
            request = following
        (reward,) = await call_reward(
            self.reward_fn,
            self.tokenizer.decode(request.input_ids),
            request.input_ids,
            [text],
            [response.output_tokens],
            {**data, "transcript": self.tokenizer.decode(conversation.tokens)},
        )
        return conversation, reward

    def call(self, text: str) -> str:
        """The tool's answer to one call, or the reason why the call cannot be made."""
        call = parse_call(text)
        if call is None:
            return CALL_ERROR
        name, arguments = call
        if not isinstance(name, str) or name not in self.tools:
            return f"error: there is no tool {name}; there are {', '.join(self.tools)}"
        tool = self.tools[name]
        if not isinstance(arguments, dict) or set(arguments) != set(tool.parameters):
            return f"error: {name} takes {', '.join(tool.parameters)}"
        try:
            result = str(tool.run(**{key: str(value) for key, value in arguments.items()}))
        except SandboxError:  # this machine's fault, not the model's
            raise
        except Exception as error:
            result = f"error: {type(error).__name__}: {error}"
        return result[: self.config.max_result_chars]


def tool_role(tokenizer: Any) -> str:
    """The role in which results come back: `tool` if the template knows it, else `user`."""
    if not tokenizer.chat_template:
        return "user"
    try:
        turn_ids(tokenizer, [], [{"role": "tool", "content": "x"}])
    except TemplateError:
        return "user"
    return "tool"
