"""Cases for every preference format: a row as in axolotl's documentation, the expected texts, and bad rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MISSING = object()
USER, BOT = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}
WRONG = {"role": "assistant", "content": "six"}


@dataclass(frozen=True)
class Case:
    """A format, a row of it, and the expected texts. `bad` pairs changes of fields with the expected message."""

    type: str
    row: dict[str, Any]
    prompt: str
    answers: tuple[str, ...]
    bad: tuple[tuple[dict[str, Any], str], ...]
    options: dict[str, Any] = field(default_factory=dict)
    label: bool | None = None

    @property
    def id(self) -> str:
        return f"{'kto' if self.label is not None else 'dpo'}-{self.type}"

    def broken(self, change: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in {**self.row, **change}.items() if value is not MISSING}


def chatml(system: str = "") -> str:
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return head + "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"


def llama3(system: str = "") -> str:
    head = f"<|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>" if system else ""
    return (
        head
        + "<|start_header_id|>user<|end_header_id|>\n\n2+3?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


WRITERS = {"chatml": (chatml, "<|im_end|>"), "llama3": (llama3, "<|eot_id|>")}


def text_case(writer: str, name: str, prompt: str, chosen: str, rejected: str, system: str = "Count.") -> Case:
    """Makes a case of {system?, prompt, chosen, rejected}, all text."""
    write, end = WRITERS[writer]
    row = {prompt: "2+3?", chosen: "5", rejected: "six", **({"system": system} if system else {})}
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({prompt: MISSING}, "missing or null; expected text"),
        ({chosen: ["5"]}, f"{chosen} is ['5']; expected text"),
        (
            {rejected: None},
            "rejected or rejected_response is missing" if name in ("", ".default") else f"{rejected} is missing",
        ),
        ({"system": 3}, "system is 3; expected text"),
    )
    return Case(f"{writer}{name}", row, write(system), (f"5{end}", f"six{end}"), bad)


def messages_cases(writer: str) -> list[Case]:
    """Makes the cases of a fixed template whose answers are lists of messages."""
    write, end = WRITERS[writer]
    return [
        Case(
            f"{writer}.argilla_chat",
            {"chosen": [USER, BOT], "rejected": [USER, WRONG]},
            write(),
            (f"5{end}", f"six{end}"),
            (
                ({"chosen": "5"}, "chosen is '5'; expected a list of messages"),
                ({"chosen": [USER]}, "chosen is ['user']; expected messages that end in"),
                (
                    {"rejected": [{"role": "user", "content": "2+4?"}, WRONG]},
                    "it must equal chosen up to the last message",
                ),
                (
                    {"rejected": [USER, {"role": "gpt", "content": "6"}]},
                    "rejected[1].role is 'gpt'; expected one of system, user",
                ),
            ),
        ),
        Case(
            f"{writer}.ultra",
            {"system": "Count.", "prompt": "2+3?", "chosen": [USER, BOT], "rejected": [USER, WRONG]},
            write("Count."),
            (f"5{end}", f"six{end}"),
            (
                ({"prompt": None}, "prompt is missing or null"),
                ({"chosen": [BOT]}, "chosen is ['assistant']; expected one user message, then one assistant message"),
                ({"rejected": [USER, {"role": "assistant"}]}, "rejected[1].content is missing or null; expected text"),
                ({"rejected": []}, "rejected is []; expected a list of messages"),
            ),
        ),
    ]


TEMPLATE = "<|user|>2+3?<|assistant|>"
MAPPED = {
    "message_property_mappings": {"role": "from", "content": "value"},
    "roles": {"user": ["human"], "assistant": ["gpt"]},
}
PAIR_CASES = [
    *(case for writer in WRITERS for case in messages_cases(writer)),
    *(text_case(w, "", "prompt", "chosen", "rejected") for w in WRITERS),
    *(text_case(w, ".default", "instruction", "chosen_response", "rejected_response", "") for w in WRITERS),
    *(text_case(w, ".argilla", "instruction", "chosen_response", "rejected_response") for w in WRITERS),
    *(text_case(w, ".icr", "input", "chosen", "rejected") for w in WRITERS),
    *(text_case(w, ".intel", "question", "chosen", "rejected") for w in WRITERS),
    *(text_case(w, ".prompt_pairs", "prompt", "chosen", "rejected", "") for w in WRITERS),
    Case(
        "zephyr.nectar",
        {"prompt": "2+3?", "answers": [{"answer": a, "rank": r} for a, r in (("four", 2), ("six", 7), ("5", 1))]},
        "<|system|>\n</s>\n<|user|>\n2+3?</s>\n<|assistant|>\n",
        ("5", "six"),
        (
            ({"answers": [{"answer": "5", "rank": 1}]}, "expected a list of at least two ranked answers"),
            ({"answers": [{"answer": "5", "rank": "1"}] * 2}, "answers[0].rank is '1'; expected a number"),
            ({"answers": [{"answer": "5", "rank": 1}, {"rank": 2}]}, "answers[1].answer is missing or null"),
            ({"answers": [{"answer": "5", "rank": 1}] * 2}, "answers is [1, 1]; expected different ranks"),
            ({"prompt": 4}, "prompt is 4; expected text"),
        ),
    ),
    Case(
        "chat_template.argilla_chat",
        {"chosen": [USER, BOT, USER, BOT], "rejected": [USER, BOT, USER, WRONG]},
        "<|user|>2+3?<|assistant|>5<|endoftext|><|user|>2+3?<|assistant|>",
        ("5<|endoftext|>", "six<|endoftext|>"),
        (
            ({"rejected": [USER, WRONG]}, "rejected is ['2+3?']; it must equal chosen up to the last message"),
            ({"chosen": MISSING}, "chosen is missing or null; expected a list of messages"),
            ({"chosen": [USER, BOT, BOT]}, "expected messages that end in exactly one assistant message"),
        ),
    ),
    Case(
        "chat_template.default",
        {"messages": [{"role": "system", "content": "Count."}, USER], "chosen": BOT, "rejected": WRONG},
        "<|system|>Count.<|user|>2+3?<|assistant|>",
        ("5<|endoftext|>", "six<|endoftext|>"),
        (
            ({"messages": [USER, BOT]}, "messages[1].role is 'assistant'; expected another role before the answer"),
            ({"chosen": USER}, "chosen.role is 'user'; expected assistant"),
            ({"rejected": 5}, "rejected is 5; expected an object with 'role' and 'content'"),
            ({"messages": [{"role": "human", "content": "?"}]}, "messages[0].role is 'human'; expected one of system"),
        ),
    ),
    Case(
        "chat_template.default",
        {"chat": [{"from": "human", "value": "2+3?"}], "good": {"from": "gpt", "value": "5"}, "worse": "six"},
        TEMPLATE,
        ("5<|endoftext|>", "six<|endoftext|>"),
        (
            ({"chat": [USER]}, "chat[0].from is missing or null; expected one of human, gpt"),
            ({"good": {"from": "gpt"}}, "good.value is missing or null; expected text"),
            ({"worse": []}, "worse is []; expected an object with 'from' and 'value'"),
        ),
        {"field_messages": "chat", "field_chosen": "good", "field_rejected": "worse", **MAPPED},
    ),
    Case(
        "chat_template.argilla",
        {"system": "Count.", "prompt": "2+3?", "chosen": [USER, BOT], "rejected": [USER, WRONG]},
        "<|system|>Count.<|user|>2+3?<|assistant|>",
        ("5<|endoftext|>", "six<|endoftext|>"),
        (
            ({"chosen": [USER, USER, BOT], "rejected": [USER, USER, WRONG]}, "expected user and assistant in turn"),
            ({"rejected": [{"role": "user", "content": "2+4?"}, WRONG]}, "it must equal chosen up to the last message"),
            ({"chosen": "5"}, "chosen is '5'; expected a list of messages"),
            ({"prompt": ["2+3?"]}, "prompt is ['2+3?']; expected text"),
        ),
    ),
    Case(
        "user_defined.default",
        {"ctx": "Count.", "q": "2+3?", "good": "5", "worse": "six"},
        "[Count.] 2+3? =",
        (" 5!", " six"),
        (
            ({"q": None}, "q is missing or null"),
            ({"good": 5}, "good is 5; expected text"),
            ({"ctx": ["Count."]}, "ctx is ['Count.']; expected text"),
            ({"worse": {"text": "six"}}, "worse is {'text': 'six'}; expected text"),
        ),
        {
            "field_prompt": "q", "field_system": "ctx", "field_chosen": "good", "field_rejected": "worse",
            "prompt_format": "[{system}] {prompt} =", "chosen_format": " {chosen}!", "rejected_format": " {rejected}",
        },
    ),
]  # fmt: skip


def judged_case(writer: str, name: str, prompt: str) -> Case:
    """Makes a case of {system?, prompt, completion, label}."""
    write, end = WRITERS[writer]
    row = {"system": "Count.", prompt: "2+3?", "completion": "5", "label": True}
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({prompt: MISSING}, f"{prompt} is missing or null"),
        ({"completion": [BOT]}, "completion is [{"),
        ({"label": MISSING}, "label is missing or null; expected true or false"),
        ({"label": "good"}, "label is 'good'; expected true or false"),
    )
    return Case(f"{writer}{name}", row, write("Count."), (f"5{end}",), bad, {}, True)


def judged_chat(writer: str, row: dict[str, Any]) -> Case:
    write, end = WRITERS[writer]
    return Case(
        f"{writer}.argilla_chat",
        row,
        write(),
        (f"six{end}",),
        (
            ({"completion": "six"}, "completion is 'six'; expected a list of messages"),
            ({"completion": [WRONG], "chosen": MISSING}, "expected messages that end in exactly one assistant"),
            ({"label": None}, "label is missing or null"),
        ),
        {},
        False,
    )


JUDGED_CASES = [
    *(judged_case(w, name, prompt) for w in WRITERS for name, prompt in (
        (".argilla", "instruction"), (".intel", "question"), (".prompt_pairs", "prompt"), (".ultra", "prompt"),
    )),
    judged_chat("chatml", {"chosen": [USER], "completion": [WRONG], "label": False}),
    judged_chat("llama3", {"completion": [USER, WRONG], "label": "false"}),
    Case(
        "user_defined.default",
        {"prompt": "2+3?", "completion": "5", "good": 1},
        TEMPLATE,
        ("5",),
        (
            ({"prompt": 2}, "prompt is 2; expected text"),
            ({"completion": None}, "completion is missing or null"),
            ({"good": 0.5}, "good is 0.5; expected true or false"),
        ),
        {"prompt_format": "<|user|>{prompt}<|assistant|>", "field_label": "good"},
        True,
    ),
]  # fmt: skip
