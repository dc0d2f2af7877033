"""What SGLang's `/generate` is asked, and its answers as tokens with log-probs and weight versions, put together."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from megarl.rollout.api import GenerationError
from megarl.types import GenerationHyperparameters, ModelRequest, ModelResponse

log = logging.getLogger(__name__)
EXCERPT = 500


@dataclass(frozen=True)
class CompletionPart:
    """What one answer adds to a completion: per token its id, log-prob and weight version, and why it ended."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: str


@dataclass
class Draft:
    """A completion that is being written, piece by piece."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str = "abort"
    fruitless: int = 0  # pieces without a token, in a row

    def add(self, piece: CompletionPart, most: int) -> None:
        """Goes on by a piece; a completion of `most` tokens is complete even if it was aborted there.

        Of an aborted one SGLang has not looked whether the last token ends it, so that token is sampled again.
        """
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.versions += piece.versions
        self.reason = "length" if piece.stop_reason == "abort" and len(self.tokens) >= most else piece.stop_reason
        self.fruitless = 0 if piece.tokens else self.fruitless + 1
        if self.reason == "abort":
            for values in (self.tokens, self.logprobs, self.versions):
                del values[-1:]

    def response(self, req: ModelRequest) -> ModelResponse:
        """What it is once it is complete."""
        reason: Literal["length", "stop"] = "length" if self.reason == "length" else "stop"
        return ModelResponse(list(req.input_ids), self.tokens, self.logprobs, self.versions, reason)


@dataclass
class Asked:
    """Completions of one prompt that somebody waits for: the tokens that each goes on from, and how it is sampled."""

    inputs: list[list[int]]
    params: list[dict[str, Any]]
    pieces: asyncio.Future[list[CompletionPart]]


def sampling_params(gconfig: GenerationHyperparameters, done: int = 0) -> dict[str, Any]:
    """SGLang's `sampling_params` of a completion that has `done` tokens already."""
    params: dict[str, Any] = {
        "max_new_tokens": gconfig.max_new_tokens - done,
        "min_new_tokens": max(gconfig.min_new_tokens - done, 0),
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": gconfig.top_k,
    }
    if gconfig.stop:
        params["stop"] = list(gconfig.stop)
    if gconfig.stop_token_ids:
        params["stop_token_ids"] = list(gconfig.stop_token_ids)
    return params


def parse_answer(body: bytes, count: int, address: str) -> list[CompletionPart]:
    """The `count` pieces in the body of a 200 answer of `/generate`. Raises GenerationError on anything unexpected.

    One completion whose log-probs or versions do not belong to its tokens does not spoil the others: its log-probs are
    NaN, as SGLang's own may be, upon which `executor.quarantine` leaves it out.
    """
    try:
        answers = orjson.loads(body)
        if len(answers) != count:
            raise ValueError(f"{len(answers)} completions instead of {count}")
        return [_parse_piece(answer["output_ids"], answer["meta_info"]) for answer in answers]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise GenerationError(f"{address} gave a malformed answer ({named(error)}): {excerpt(body)}") from error


def _parse_piece(output_ids: list[int], meta: dict[str, Any]) -> CompletionPart:
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {reason!r}")
    if not output_ids and reason == "abort":
        return CompletionPart([], [], [], reason)
    scored = meta["output_token_logprobs"]
    logprobs = [math.nan if entry[0] is None else float(entry[0]) for entry in scored]  # null: not finite
    versions: list[int] = []
    whole = [entry[1] for entry in scored] == output_ids
    for span in meta["weight_versions"]:
        whole = whole and span["start"] == len(versions)
        versions += [version_of(span["version"])] * (span["end"] - span["start"])
    if not whole or len(versions) != len(output_ids):
        count = len(output_ids)
        log.warning("a completion of %d tokens with %d log-probs, %d versions", count, len(scored), len(versions))
        return CompletionPart(output_ids, [math.nan] * count, [-1] * count, reason)
    return CompletionPart(output_ids, logprobs, versions, reason)


def version_of(label: Any) -> int:
    """The number that a server labels its weights with. Raises ValueError where it is none."""
    if not isinstance(label, str) or not label.isdecimal():
        raise ValueError(f"weight version {label!r} is not a number")
    return int(label)


def named(error: BaseException) -> str:
    """An error's kind and what it says."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def excerpt(body: bytes) -> str:
    """The beginning of an answer, for messages."""
    return body[:EXCERPT].decode(errors="replace")
