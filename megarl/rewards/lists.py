"""Reward functions of lists, as in TRL and axolotl: `f(completions, **columns) -> list[float | None]`.

Such a function is called once with all completions of a prompt, so it may compare them with each other. A workflow that
scores each conversation on its own passes lists of one. None means that a reward does not apply to a completion.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Turn(str):
    """One character of a `Chat`, which also reads as the message of its index: `turn["content"]`."""

    message: Mapping[str, Any]

    def __getitem__(self, key: Any) -> Any:
        return self.message[key] if isinstance(key, str) else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field of the message, as `dict.get` does."""
        return self.message.get(key, default)


class Chat(str):
    """Text that also reads as a conversation.

    TRL passes conversations as lists of messages, so functions written for it ask `completion[0]["content"]`. Others
    take the text. Both work: `chat[i]` is the character there, and for an index of a message also that message.
    """

    messages: Sequence[Mapping[str, Any]]

    @staticmethod
    def of(text: str, messages: Sequence[Mapping[str, Any]]) -> Chat:
        """Makes text that reads as these messages too."""
        chat = Chat(text)
        chat.messages = messages
        return chat

    def __getitem__(self, index: Any) -> str:
        if not isinstance(index, int) or not -len(self.messages) <= index < len(self.messages):
            return super().__getitem__(index)
        turn = Turn(super().__getitem__(index) if -len(self) <= index < len(self) else "")
        turn.message = self.messages[index]
        return turn


class ListReward:
    """A function of lists as a reward function: called for one completion, or for all completions of a prompt."""

    takes_lists = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__module__ = function.__module__

    def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float | None:
        (value,) = self.score_group(prompt, prompt_ids, [completions], [completion_ids], data)
        return value

    def score_group(
        self,
        prompt: str,
        prompt_ids: list[int],
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        data: Mapping[str, Any],
    ) -> list[float | None]:
        """Calls the function once for all completions of a prompt. Returns a value for each, None where none applies.

        Raises:
            TypeError: the function did not return one value for each completion.
        """
        parameters = set(inspect.signature(self.function).parameters)
        arguments = list_arguments(parameters, prompt, completions, completion_ids, data)
        values = self.function(**arguments)
        if inspect.isawaitable(values):
            values = asyncio.run(_awaited(values))
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(completions):
            shown = f"{len(values)} values" if isinstance(values, Sequence) else repr(values)
            raise TypeError(f"it returned {shown} for {len(completions)} completions; return a list of one for each")
        return list(values)


async def _awaited(value: Any) -> Any:
    return await value


def list_arguments(
    parameters: set[str],
    prompt: str,
    completions: Sequence[str],
    completion_ids: Sequence[list[int]],
    data: Mapping[str, Any],
) -> dict[str, list[Any]]:
    """Builds the arguments of a function of lists.

    They are `prompts`, `completions`, `completion_ids` and every column, each a list with an element for each
    completion. A plural parameter without a column gets the singular one: `answers` receives the column `answer`.
    """
    count = len(completions)
    columns = {name: [value] * count for name, value in data.items()}
    for name in parameters:
        if name not in columns and name.endswith("s") and name[:-1] in columns:
            columns[name] = columns[name[:-1]]
    messages = data.get("messages")
    chat = Chat.of(prompt, messages if isinstance(messages, list) else [])
    answers = [Chat.of(text, [{"role": "assistant", "content": text}]) for text in completions]
    return {"prompts": [chat] * count, "completion_ids": list(completion_ids), **columns, "completions": answers}
