"""Writes chats as text and token ids: chat templates, fixed turns of ChatML, Llama 3 and Zephyr, loss masks."""

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
    """Fixed chat template. A turn is `head` with the role filled in, the text, `end` and `separator`."""

    head: str
    end: str
    separator: str
    answer_end: str  # after a completion
    begin: str = ""  # before the first turn, in Jinja

    def text(self, messages: list[Message]) -> str:
        """Writes the turns, without the head of the answer."""
        return "".join(f"{self.head.format(role=m['role'])}{m['content']}{self.end}{self.separator}" for m in messages)

    def prompt(self, messages: list[Message]) -> str:
        """Writes the turns and the head of the answer."""
        return self.text(messages) + self.head.format(role="assistant")

    def jinja(self) -> str:
        """Returns the template as Jinja, with `{% generation %}` around the assistant's text for the loss mask."""
        before, after = self.head.split("{role}")
        head = f"{{{{ {before!r} + message['role'] + {after!r} }}}}"
        content = f"{{{{ message['content'] + {self.end!r} }}}}"
        return (
            f"{self.begin}{{% for message in messages %}}{head}"
            f"{{% if message['role'] == 'assistant' %}}{{% generation %}}{content}{{% endgeneration %}}"
            f"{{% else %}}{content}{{% endif %}}{{{{ {self.separator!r} }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {(before + 'assistant' + after)!r} }}}}{{% endif %}}"
        )


CHATML = Turns("<|im_start|>{role}\n", "<|im_end|>", "\n", "<|im_end|>")
LLAMA3 = Turns(
    "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "", "<|eot_id|>", "{{ bos_token | default('') }}"
)
ZEPHYR = Turns("<|{role}|>\n", "</s>", "\n", "")
NAMED = {"chatml": CHATML, "llama3": LLAMA3}


def set_chat_template(tokenizer: Any, choice: str) -> None:
    """Sets the tokenizer's chat template: `chatml`, `llama3`, a file, or Jinja text. Empty keeps its own.

    Raises:
        UserError: `choice` is not a name, Jinja text or a readable file.
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
    """Tokenizes the prompt of a rollout with the chat template, or as plain text if the tokenizer has none.

    As `RLVRWorkflow` does, it asks templates with a mode of thinking, such as Qwen3's, for an answer without.
    """
    if getattr(tokenizer, "chat_template", None):
        options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False, "enable_thinking": False}
        return tokenizer.apply_chat_template(messages, **options)
    return tokenizer.encode("".join(message["content"] for message in messages))


def rendered(tokenizer: Any, messages: list[Message], cue: bool) -> str:
    """Writes a chat with the tokenizer's template. `cue` adds the head of the answer.

    Raises:
        BadRow: the template refuses the chat.
    """
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=cue)
    except TemplateError as error:
        raise BadRow("the chat", [m["role"] for m in messages], f"the chat template says: {error}") from error


def need_chat_template(tokenizer: Any, type_: str) -> None:
    """Raises `UserError` if the tokenizer has no chat template, which rows of this type need."""
    if not tokenizer.chat_template:
        raise UserError(f"type {type_} needs a chat template and the tokenizer has none; set data.chat_template")


def answer_text(tokenizer: Any, messages: list[Message], prompt: str, answer: str) -> str:
    """Returns the text that the tokenizer's template writes after `prompt` for an answer, up to the end of the turn.

    Raises:
        UserError: the template's text of the whole chat does not start with `prompt`.
    """
    full_text = rendered(tokenizer, [*messages, {"role": "assistant", "content": answer}], cue=False)
    if not full_text.startswith(prompt):
        raise UserError(
            "with the tokenizer's chat template, a chat with its answer does not start with the text of its prompt, so "
            "the completion cannot be separated; set data.chat_template to chatml, llama3 or a Jinja file"
        )
    return full_text[len(prompt) :].rstrip()


def stop_ids(tokenizer: Any) -> set[int]:
    """Collects the ids of special tokens. A completion that ends in one needs no eos token."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def begins_with_bos(tokenizer: Any) -> bool:
    """True if the tokenizer puts a bos token before a text."""
    return tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]


def split_ids(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Tokenizes prompt and completion, without added special tokens. No token spans the two.

    If the tokens of the whole text start with the prompt's, the completion is the rest of them. A tokenizer that begins
    every text with a space then puts none into the middle. Otherwise the completion is tokenized alone.
    """
    prompt_tokens = tokenizer.encode(prompt, add_special_tokens=False)
    all_tokens = tokenizer.encode(prompt + completion, add_special_tokens=False)
    if all_tokens[: len(prompt_tokens)] == prompt_tokens:
        return prompt_tokens, all_tokens[len(prompt_tokens) :]
    return prompt_tokens, tokenizer.encode(completion, add_special_tokens=False)


def chat_ids(tokenizer: Any, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Tokenizes a chat, with a loss mask of 1 on the assistant's text and the end of its turns.

    If the template marks `{% generation %}`, the mask is that. Otherwise it covers the text that each assistant turn
    adds to the chat before it. That fails for a template that changes a turn once others follow, which is refused.

    Raises:
        BadRow: the chat has no assistant turn.
        UserError: the template changes turns, or the tokenizer gives no offsets.
    """
    if not any(m["role"] == "assistant" for m in messages):
        raise BadRow("messages", [m["role"] for m in messages], "expected at least one assistant turn")
    if "generation" in tokenizer.chat_template.replace("add_generation_prompt", ""):
        out = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(out["input_ids"]), list(out["assistant_masks"])
    full_text = rendered(tokenizer, messages, cue=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, upto = (
                rendered(tokenizer, messages[:i], cue=True),
                rendered(tokenizer, messages[: i + 1], cue=False),
            )
            if not (upto.startswith(before) and full_text.startswith(upto.rstrip())):
                raise UserError(
                    "the tokenizer's chat template changes an assistant turn once others follow, so its tokens cannot "
                    "be masked; set data.chat_template to one with {% generation %} (chatml, llama3)"
                )
            spans.append((len(before), len(upto.rstrip())))
    if not tokenizer.is_fast:
        raise UserError("the tokenizer has no fast version, which gives the tokens' offsets in the text; convert it")
    out = tokenizer(full_text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(a <= start < end <= b for a, b in spans)) for start, end in out["offset_mapping"]]
    return list(out["input_ids"]), mask
