"""Formats of preference data: pairs of a chosen and a rejected completion, and single judged completions (KTO).

`PAIRS` and `JUDGED` list all formats under the names of axolotl's `type:`. A format reads rows of one shape and writes
the chat with a fixed template, with the tokenizer's template, or with the user's format strings.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.data.config import SourceConfig
from megarl.data.prepare import FIELDS, ROLES, BadRow, Row, message_of
from megarl.data.templates import CHATML, LLAMA3, ZEPHYR, Message, Turns
from megarl.knobs import UserError, shown

CHOSEN, REJECTED, COMPLETION = "chosen", "rejected", "completion"


Draft = tuple[list[Message], list[str]]  # the chat before the answer, and the answers
Options = dict[str, Any]
Reader = Callable[[Row, Options], Draft]


@dataclass(frozen=True)
class Format:
    """A row reader, the template that writes the chat, and the options with their defaults."""

    read: Reader
    write: Turns | str | None = None  # None: the tokenizer's template; "formats": the options' format strings
    options: tuple[tuple[str, Any], ...] = ()


def texts(prompt: str, *answers: str) -> Reader:
    """Reads {system?, prompt, answers...}, all text.

    An argument may be several column names joined by `|`; the first that the row has is read.
    """

    def read(row: Row, options: Options) -> Draft:
        def text(names: str) -> str:
            column = next((name for name in names.split("|") if row.has(name)), None)
            if column is None:
                raise BadRow(names.replace("|", " or "), None, "expected text")
            return row.text(column)

        answer_texts = [text(names) for names in answers]
        return [*_system(row), {"role": "user", "content": text(prompt)}], answer_texts

    return read


def named_texts(*answers: str) -> Reader:
    """Reads {system?, prompt, answers...} from the columns that the options name."""

    def read(row: Row, options: Options) -> Draft:
        chat = [*_system(row, options["field_system"]), {"role": "user", "content": row.text(options["field_prompt"])}]
        return chat, [row.text(options[f"field_{name}"]) for name in answers]

    return read


def prompt_and_messages(*answers: str) -> Reader:
    """Reads {system?, prompt, answers[user, assistant]...}.

    The prompt is `prompt`. Each answer column holds a user and an assistant message, of which the latter counts.
    """

    def read(row: Row, options: Options) -> Draft:
        chats = [row.messages(name, FIELDS, ROLES) for name in answers]
        for name, chat in zip(answers, chats, strict=True):
            if [m["role"] for m in chat] != ["user", "assistant"]:
                raise BadRow(name, [m["role"] for m in chat], "expected one user message, then one assistant message")
        return [*_system(row), {"role": "user", "content": row.text("prompt")}], [chat[1]["content"] for chat in chats]

    return read


def conversations(*answers: str, before: str = "") -> Reader:
    """Reads {answers[messages]...}. All messages but the last are the prompt, and must be equal in all answers.

    If the row has the column `before`, its messages come first.
    """

    def read(row: Row, options: Options) -> Draft:
        mapping, roles = _mapping(options)
        names = [options.get(f"field_{name}", name) for name in answers]
        earlier = row.messages(before, mapping, roles) if before and row.has(before) else []
        chats = [earlier + row.messages(name, mapping, roles) for name in names]
        for name, chat in zip(names, chats, strict=True):
            _check_answer(name, chat)
            if chat[:-1] != chats[0][:-1]:
                raise BadRow(
                    name, [m["content"] for m in chat[:-1]], f"it must equal {names[0]} up to the last message"
                )
        return chats[0][:-1], [chat[-1]["content"] for chat in chats]

    return read


def alternating(*answers: str) -> Reader:
    """Reads {system?, prompt?, answers[messages]...}: alternating user and assistant, equal up to the last message.

    `prompt` replaces the user's message if there is only one turn.
    """
    read_conversations = conversations(*answers)

    def read(row: Row, options: Options) -> Draft:
        chat, answer_texts = read_conversations(row, options)
        roles = [m["role"] for m in chat]
        if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
            raise BadRow(answers[0], [*roles, "assistant"], "expected user and assistant in turn, an even number")
        if len(chat) == 1 and row.has("prompt"):
            chat = [{"role": "user", "content": row.text("prompt")}]
        return [*_system(row), *chat], answer_texts

    return read


def messages_and_answers(*answers: str) -> Reader:
    """Reads {messages[messages] or text, answers...}.

    An answer is {role, content}, text, or a list of messages, of which the last counts.
    """

    def read(row: Row, options: Options) -> Draft:
        mapping, roles = _mapping(options)
        field = options["field_messages"]
        if isinstance(row.values.get(field), str):
            chat = [{"role": "user", "content": row.text(field)}]
        else:
            chat = row.messages(field, mapping, roles)
        if chat[-1]["role"] == "assistant":
            raise BadRow(
                f"{field}[{len(chat) - 1}].role",
                "assistant",
                "expected another role before the answer",
            )
        return chat, [_answer(row, options[f"field_{name}"], mapping, roles) for name in answers]

    return read


def nectar(row: Row, options: Options) -> Draft:
    """Reads {prompt, answers[{answer, rank}]}. Rank 1 is the best. The best answer is chosen, the worst rejected."""
    answers = row.values.get("answers")
    if not isinstance(answers, list) or len(answers) < 2:
        raise BadRow("answers", answers, "expected a list of at least two ranked answers")
    for i, entry in enumerate(answers):
        if not isinstance(entry, dict) or not isinstance(entry.get("answer"), str):
            value = entry.get("answer") if isinstance(entry, dict) else entry
            raise BadRow(f"answers[{i}].answer", value, "expected text")
        if isinstance(rank := entry.get("rank"), bool) or not isinstance(rank, int | float) or rank != rank:
            raise BadRow(f"answers[{i}].rank", rank, "expected a number")
    ranked = sorted(answers, key=lambda entry: entry["rank"])
    if ranked[0]["rank"] == ranked[-1]["rank"]:
        raise BadRow("answers", [entry["rank"] for entry in ranked], "expected different ranks")
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": row.text("prompt")}]
    return chat, [ranked[0]["answer"], ranked[-1]["answer"]]


def _system(row: Row, field: str = "system") -> list[Message]:
    text = row.optional_text(field)
    return [{"role": "system", "content": text}] if text else []


def _mapping(options: Options) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the keys of a message's role and content, and the template's role for each role of the data."""
    roles = options.get("roles")
    role_names = {source: role for role, sources in roles.items() for source in sources} if roles else ROLES
    return {**FIELDS, **options.get("message_property_mappings", {})}, role_names


def _check_answer(name: str, chat: list[Message]) -> None:
    roles = [m["role"] for m in chat]
    if roles[-1] != "assistant" or len(roles) < 2 or roles[-2] == "assistant":
        raise BadRow(name, roles, "expected messages that end in exactly one assistant message")


def _answer(row: Row, field: str, mapping: dict[str, str], roles: dict[str, str]) -> str:
    value = row.values.get(field)
    if isinstance(value, str):
        return value
    where = field
    if isinstance(value, list) and value:
        value, where = value[-1], f"{field}[{len(value) - 1}]"
    message = message_of(value, where, mapping, roles)
    if message["role"] != "assistant":
        raise BadRow(f"{where}.role", message["role"], "expected assistant")
    return message["content"]


MESSAGES = (("message_property_mappings", FIELDS), ("roles", {role: [role] for role in ROLES}))
NAMES = (("field_chosen", CHOSEN), ("field_rejected", REJECTED))
USER = (("field_prompt", "prompt"), ("field_system", "system"), ("prompt_format", "{prompt}"))
PAIR = (CHOSEN, REJECTED)

PAIR_ROWS: dict[str, Reader] = {
    "": texts("prompt|input|question|instruction", "chosen|chosen_response", "rejected|rejected_response"),
    ".default": texts("prompt|input|question|instruction", "chosen|chosen_response", "rejected|rejected_response"),
    ".argilla": texts("instruction", "chosen_response", "rejected_response"),
    ".argilla_chat": conversations(*PAIR),
    ".icr": texts("input", *PAIR),
    ".intel": texts("question", *PAIR),
    ".prompt_pairs": texts("prompt", *PAIR),
    ".ultra": prompt_and_messages(*PAIR),
}
JUDGED_ROWS: dict[str, Reader] = {
    ".argilla": texts("instruction", COMPLETION),
    ".argilla_chat": conversations(COMPLETION, before=CHOSEN),
    ".intel": texts("question", COMPLETION),
    ".prompt_pairs": texts("prompt", COMPLETION),
    ".ultra": texts("prompt", COMPLETION),
}
PAIRS: dict[str, Format] = {
    **{f"chatml{name}": Format(read, CHATML) for name, read in PAIR_ROWS.items()},
    **{f"llama3{name}": Format(read, LLAMA3) for name, read in PAIR_ROWS.items()},
    "zephyr.nectar": Format(nectar, ZEPHYR),
    "chat_template.argilla": Format(alternating(*PAIR)),
    "chat_template.argilla_chat": Format(conversations(*PAIR), None, NAMES + MESSAGES),
    "chat_template.default": Format(
        messages_and_answers(*PAIR), None, (("field_messages", "messages"), *NAMES, *MESSAGES)
    ),
    "user_defined.default": Format(
        named_texts(*PAIR), "formats", (*USER, *NAMES, ("chosen_format", "{chosen}"), ("rejected_format", "{rejected}"))
    ),
}
JUDGED: dict[str, Format] = {
    **{f"chatml{name}": Format(read, CHATML) for name, read in JUDGED_ROWS.items()},
    **{f"llama3{name}": Format(read, LLAMA3) for name, read in JUDGED_ROWS.items()},
    "user_defined.default": Format(
        named_texts(COMPLETION),
        "formats",
        (*USER, ("field_completion", COMPLETION), ("field_label", "label"), ("completion_format", "{completion}")),
    ),
}


def format_of(source: SourceConfig, paired: bool) -> tuple[Format, Options]:
    """Looks up the format of a type, and returns it with its options, defaults filled in.

    Raises:
        UserError: the type or an option is unknown, or a format string leaves the text out.
    """
    table = PAIRS if paired else JUDGED
    if source.type not in table:
        raise UserError(
            f"type {source.type!r} of {shown(source.path)} is not a format of {'pairs' if paired else 'KTO'}; choose "
            f"from {', '.join(table)}"
        )
    format_ = table[source.type]
    defaults = dict(format_.options)
    if unknown := [name for name in source.options if name not in defaults]:
        known = f"; it takes {', '.join(defaults)}" if defaults else ", which takes none"
        raise UserError(f"{shown(unknown[0])} is not an option of type {source.type}{known}")
    options = {**defaults, **{name: value for name, value in source.options.items() if value}}
    for name, value in options.items():
        if name.endswith("_format"):
            _check_format(name, value)
    return format_, options


def _check_format(name: str, text: str) -> None:
    """Raises `UserError` unless the format string names its text. Only the prompt's may also name `system`."""
    main = name.removesuffix("_format")
    allowed = {main, "system"} if main == "prompt" else {main}
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}
    except ValueError as error:
        raise UserError(f"{name}={text!r} is not a format string ({error}); write a brace as {{{{ or }}}}") from error
    if main not in fields or fields - allowed:
        raise UserError(
            f"{name}={text!r} names {sorted(fields)}; it must name {{{main}}}"
            + (" and may name {system}" if main == "prompt" else " alone")
        )
