"""Conversations by messages: each prompt is what the chat template makes of them, in one or several sequences.

    prompt 1 answer 1                                       segment 1
    prompt 2 (answer 1 rewritten) answer 2                  segment 2
             the template keeps it: + turn 2 + answer 2     still segment 1

Templates may rewrite what was said before: Qwen3's drops `<think>` blocks before the last user turn, GLM-4.5's strips
white space. A prompt that does not continue the tokens so far then begins another segment. So every sampled token is
trained on once, after exactly the tokens that it was sampled from. Nothing that was sampled is tokenised again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.rollout.transcript import Transcript, no_room, prompt_ids
from megarl.types import GenerationHyperparameters, ModelRequest, ModelResponse

logger = logging.getLogger(__name__)

MANY_REWRITES = 8  # rewritten prompts, and more than half of all later ones: worth a warning
EXCERPT = 40  # characters of each text in that warning

Message = dict[str, Any]


class ChatTemplate:
    """A tokenizer's chat template with its options, such as `tools` or `enable_thinking`.

    Shared by the conversations of a workflow. Counts the prompts that rewrite what came before, and warns once.
    """

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self._later = 0  # prompts after a conversation's first
        self._rewritten = 0

    def text(self, messages: Sequence[Message]) -> str:
        """Text up to the model's answer; without a template the contents one after the other."""
        if not self.tokenizer.chat_template:
            return "".join(str(message["content"]) for message in messages)
        options = {"tokenize": False, "add_generation_prompt": True, "return_dict": False, **self.options}
        return str(self.tokenizer.apply_chat_template(list(messages), **options))

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of `text(messages)`."""
        return prompt_ids(self.tokenizer, messages, **self.options)

    def split_end(self, response: ModelResponse, stop: Sequence[str]) -> tuple[str, str]:
        """Texts of an answer and of the special token that ended it, "" if it was cut off or ended by a string."""
        tokens = response.output_tokens
        whole = self._decode(tokens)
        is_end = bool(tokens) and tokens[-1] in {*self.tokenizer.all_special_ids, self.tokenizer.eos_token_id}
        by_string = any(whole.endswith(text) for text in stop)
        if not self.tokenizer.chat_template or not is_end or by_string or response.stop_reason != "stop":
            return whole, ""
        return self._decode(tokens[:-1]), self._decode(tokens[-1:])

    def count(self, before: str, after: str) -> None:
        """Counts a later prompt: a rewritten one if its text `after` does not continue `before`."""
        self._later += 1
        if after.startswith(before):
            return
        self._rewritten += 1
        if self._rewritten == MANY_REWRITES and 2 * self._rewritten > self._later:
            at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
            logger.warning(
                "the chat template rewrites earlier turns in %d of %d prompts: %r became %r. Each begins another "
                "sequence, which costs time, not exactness; actor.shared_prefix=true reads common beginnings once, "
                "and a template that keeps earlier turns needs one sequence",
                *(self._rewritten, self._later, before[at : at + EXCERPT], after[at : at + EXCERPT]),
            )

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


@dataclass(eq=False)
class Conversation:
    """One sampled conversation: `ask` for an answer, record it by `sample`, and so on.

    `messages` has the answers as the model wrote them, without the token that ended them. `segments` are its sequences;
    the model reads and continues the last one.
    """

    template: ChatTemplate
    messages: list[Message] = field(default_factory=list)
    segments: list[Transcript] = field(default_factory=list)
    _read: str = ""  # text of the last prompt, then also of its answer
    _stop: list[str] = field(default_factory=list)  # strings that end the answer asked for

    def begin(
        self, messages: Sequence[Message], gconfig: GenerationHyperparameters, max_sequence_tokens: int | None
    ) -> ModelRequest:
        """Returns the request for the first answer.

        Raises:
            UserError: the prompt leaves no room for an answer.
        """
        request = self.ask(messages, gconfig, max_sequence_tokens)
        if request is None:
            raise no_room(self.template.ids(messages), max_sequence_tokens)
        return request

    def ask(
        self, turns: Sequence[Message], gconfig: GenerationHyperparameters, max_sequence_tokens: int | None
    ) -> ModelRequest | None:
        """Adds `turns` and returns the request for the next answer.

        Its prompt is the template's text of all messages. It continues the last segment where that text does, and else
        begins another. Returns None, and changes nothing, where the sequence has no room (`Transcript.ask`).
        """
        messages = [*self.messages, *turns]
        text = self.template.text(messages)
        if self.segments and text.startswith(self._read):
            tokenizer = self.template.tokenizer
            ids = list(tokenizer.encode(text[len(self._read) :], add_special_tokens=False))
            request = self.segments[-1].ask(ids, gconfig, max_sequence_tokens)
        else:
            segment = Transcript()
            request = segment.ask(self.template.ids(messages), gconfig, max_sequence_tokens)
            if request is not None:
                self.segments.append(segment)
        if request is None:
            return None
        if self.messages:
            self.template.count(self._read, text)
        self.messages, self._read, self._stop = messages, text, list(gconfig.stop)
        return request

    def sample(self, response: ModelResponse) -> None:
        """Records the model's answer to the last request."""
        self.segments[-1].sample(response)
        content, end = self.template.split_end(response, self._stop)
        self.messages = [*self.messages, {"role": "assistant", "content": content}]
        self._read += content + end

    def copy(self) -> Conversation:
        """A copy that can be continued independently."""
        segments = [segment.copy() for segment in self.segments]
        return Conversation(self.template, list(self.messages), segments, self._read, self._stop)

    def as_read(self) -> None:
        """Makes all tokens so far ones that the model read: another conversation trains on those it sampled."""
        segment = Transcript()
        segment.give(self.tokens)
        self.segments = [segment]

    @property
    def tokens(self) -> list[int]:
        """Tokens that the model read last, and its answer to them."""
        return self.segments[-1].tokens
