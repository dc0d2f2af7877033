"""Chats as text and as token ids: chat templates, the fixed turns of ChatML, Llama 3 and Zephyr, and loss masks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from megarl.data.prepare import BadRow
from megarl.knobs import UserError

Message = dict[str, str]


@dataclass(frozen=True)
class Turns:
    """How a fixed template writes a turn: `head` with the role in it, the text, `end`, and what separates turns."""

    head: str
    end: str
    separator: str
    answer_end: str  # after a completion
    begin: str = ""  # of the whole, in Jinja

    def text(self, messages: list[Message]) -> str:
        """The turns, without a cue for the answer."""
        return "".join(f"{self.head.format(role=m['role'])}{m['content']}{self.end}{self.separator}" for m in messages)

    def prompt(self, messages: list[Message]) -> str:
        """The turns and the head of the answer's."""
        return self.text(messages) + self.head.format(role="assistant")

    def jinja(self) -> str:
        """The same as a chat template; what an assistant says is marked for the loss."""
        before, after = self.head.split("{role}")
        head = f"{{{{ {before!r} + message['role'] + {after!r} }}}}"
        said = f"{{{{ message['content'] + {self.end!r} }}}}"
        return (
            f"{self.begin}{{% for message in messages %}}{head}"
            f"{{% if message['role'] == 'assistant' %}}{{% generation %}}{said}{{% endgeneration %}}"
            f"{{% else %}}{said}{{% endif %}}{{{{ {self.separator!r} }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {(before + 'assistant' + after)!r} }}}}{{% endif %}}"
        )


CHATML = Turns("<|im_start|>{role}\n", "<|im_end|>", "\n", "<|im_end|>")
LLAMA3 = Turns(
    "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "", "<|eot_id|>", "{{ bos_token | default('') }}"
)
ZEPHYR = Turns("<|{role}|>\n", "</s>", "\n", "")
NAMED = {"chatml": CHATML, "llama3": LLAMA3}


def set_chat_template(tokenizer: Any, choice: str) -> None:
    """Gives the tokenizer the template `chatml` or `llama3`, that of a file, or Jinja text; empty leaves its own.

    Raises:
        UserError: it is none of these.
    """
    if choice in NAMED:
        tokenizer.chat_template = NAMED[choice].jinja()
    elif "{{" in choice or "{%" in choice:
        tokenizer.chat_template = choice
    elif choice:
        try:
            tokenizer.chat_template = Path(choice).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"data.chat_template={choice} is not {', '.join(NAMED)}, a readable file or Jinja text"
            ) from error


def prompt_ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    """The token ids a rollout starts from: the chat template's, or the text's own where the tokenizer has none."""
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    return tokenizer.encode("".join(message["content"] for message in messages))


def rendered(tokenizer: Any, messages: list[Message], cue: bool) -> str:
    """The tokenizer's template as text; `cue` adds the head of the answer. A template's refusal is a `BadRow`."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=cue)
    except TemplateError as error:
        raise BadRow("the chat", [m["role"] for m in messages], f"the chat template says: {error}") from error


def need_chat_template(tokenizer: Any, type_: str) -> None:
    """Raises `UserError` where the tokenizer has no chat template and rows of this type need one."""
    if not tokenizer.chat_template:
        raise UserError(f"type {type_} needs a chat template and the tokenizer has none; set data.chat_template")


def answer_text(tokenizer: Any, messages: list[Message], prompt: str, answer: str) -> str:
    """What the tokenizer's template writes after `prompt` for this answer, up to the end of the turn.

    Raises:
        UserError: the template does not write the answer after the cue that it gives.
    """
    whole = rendered(tokenizer, [*messages, {"role": "assistant", "content": answer}], cue=False)
    if not whole.startswith(prompt):
        raise UserError(
            "the tokenizer's chat template writes a chat with its answer otherwise than its prompt with the answer's "
            "cue, so no completion can be told apart; set data.chat_template to chatml, llama3 or a Jinja file"
        )
    return whole[len(prompt) :].rstrip()


def stop_ids(tokenizer: Any) -> set[int]:
    """Ids of special tokens: a completion that ends in one needs no other to stop."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def begins_with_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a bos token before a text."""
    return tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]


def split_ids(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Prompt and completion as token ids, without special tokens of the tokenizer's own; no token spans the two.

    Tokens of the whole text are taken where the prompt's are its start, else each is tokenised apart: a tokenizer that
    begins every text with a space then does not put one into the middle.
    """
    first = tokenizer.encode(prompt, add_special_tokens=False)
    whole = tokenizer.encode(prompt + completion, add_special_tokens=False)
    if whole[: len(first)] == first:
        return first, whole[len(first) :]
    return first, tokenizer.encode(completion, add_special_tokens=False)


def chat_ids(tokenizer: Any, messages: list[Message]) -> tuple[list[int], list[int]]:
    """A chat's token ids and its loss mask: 1 on what the assistant says and on the end of its turn.

    Where the template marks its `{% generation %}` that is taken, else what each assistant turn adds to the chat before
    it. A template that writes a turn otherwise once others follow cannot be masked so, and is refused.

    Raises:
        BadRow: no assistant turn.
        UserError: the template or the tokenizer does not let turns be told apart.
    """
    if not any(m["role"] == "assistant" for m in messages):
        raise BadRow("messages", [m["role"] for m in messages], "a turn of the assistant is wanted")
    if "generation" in tokenizer.chat_template.replace("add_generation_prompt", ""):
        out = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(out["input_ids"]), list(out["assistant_masks"])
    whole = rendered(tokenizer, messages, cue=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, upto = (
                rendered(tokenizer, messages[:i], cue=True),
                rendered(tokenizer, messages[: i + 1], cue=False),
            )
            if not (upto.startswith(before) and whole.startswith(upto.rstrip())):
                raise UserError(
                    "the tokenizer's chat template writes an assistant's turn otherwise once others follow, so its "
                    "tokens cannot be told apart; set data.chat_template to one with {% generation %} (chatml, llama3)"
                )
            spans.append((len(before), len(upto.rstrip())))
    if not tokenizer.is_fast:
        raise UserError("the tokenizer has no fast version, which says where in the text a token lies; convert it")
    out = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(a <= start < end <= b for a, b in spans)) for start, end in out["offset_mapping"]]
    return list(out["input_ids"]), mask
