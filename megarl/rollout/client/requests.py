"""Requests to SGLang's `/generate`, and its answers as tokens with log-probs and weight versions."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal

import orjson
from torch import Tensor

from megarl.knobs import visible
from megarl.rollout.api import GenerationError
from megarl.rollout.client.routes import RouteShape, continued
from megarl.types import GenerationHyperparameters, ModelRequest, ModelResponse

log = logging.getLogger(__name__)
EXCERPT = 500  # bytes of an answer in error messages
TOKEN_LIMIT = 2**31  # of token ids; a sample with ids outside the vocabulary is left out later
VERSION_DIGITS = 18  # of a weight version, which fits into int64
MOST_LOGPROB = 1e-3  # rounding puts the log-prob of a certain token above 0, in float16 by less than this


@dataclass(frozen=True)
class CompletionPart:
    """Tokens that one answer adds to a completion, each with log-prob and weight version, and why it ended."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: str
    routes: Tensor | None = None  # of the request's tokens too; int16 [all tokens - 1, sparse layers, topk]


@dataclass
class Draft:
    """A completion under way, assembled part by part."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Tensor | None = None  # of the prompt too, without the last token's
    reason: str = "abort"
    seed: int | None = None  # of its samples, for servers in a deterministic mode
    empty_parts: int = 0  # consecutive answers without a token

    def add(self, part: CompletionPart, max_tokens: int) -> None:
        """Appends a part; a completion of `max_tokens` tokens is complete even if it was aborted there.

        SGLang has not checked whether the last token of an aborted part ends the completion, so it is sampled again.
        The route of the token before it is then chosen again too. Other tokens keep the route of the pass that sampled
        their next token, though a later part returns routes under newer weights.
        """
        self.routes = continued(self.routes, part.routes)
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self.versions += part.versions
        complete = part.stop_reason == "abort" and len(self.tokens) >= max_tokens
        self.reason = "length" if complete else part.stop_reason
        self.empty_parts = 0 if part.tokens else self.empty_parts + 1
        if self.reason == "abort":
            if self.tokens and self.routes is not None:
                self.routes = self.routes[:-1]
            for values in (self.tokens, self.logprobs, self.versions):
                del values[-1:]

    def response(self, req: ModelRequest) -> ModelResponse:
        """The response to `req`, once the completion is complete."""
        reason: Literal["length", "stop"] = "length" if self.reason == "length" else "stop"
        return ModelResponse(list(req.input_ids), self.tokens, self.logprobs, self.versions, reason, self.routes)


@dataclass
class QueuedRequest:
    """Completions of one prompt that a caller awaits: their token ids so far, and how each is sampled."""

    inputs: list[list[int]]
    params: list[dict[str, Any]]
    parts: asyncio.Future[list[CompletionPart]]


def sampling_params(gconfig: GenerationHyperparameters, done: int = 0, seed: int | None = None) -> dict[str, Any]:
    """SGLang's `sampling_params` for a completion that already has `done` tokens; `seed` only if there is one."""
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
    if seed is not None:
        params["sampling_seed"] = seed
    return params


def parse_answer(
    body: bytes, count: int, address: str, shape: RouteShape | None = None, lengths: Sequence[int] = ()
) -> list[CompletionPart]:
    """Parses the body of a 200 answer of `/generate` into `count` parts. Raises GenerationError if it is malformed.

    With `shape`, each part has routes; `lengths` are the requests' tokens. Missing routes name their completion.

    One completion whose log-probs or versions do not match its tokens, or with a log-prob above 0, does not spoil the
    others. Its log-probs become NaN, which SGLang's own may be too, and `executor.quarantine` leaves it out.
    """
    try:
        answers = orjson.loads(body)
        if len(answers) != count:
            raise ValueError(f"{len(answers)} completions instead of {count}")
        parts = [_parse_part(answer["output_ids"], answer["meta_info"]) for answer in answers]
        if shape is None:
            return parts
        return [_with_routes(each, shape) for each in zip(parts, answers, lengths, range(count), strict=True)]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise GenerationError(f"{address} gave a malformed answer ({named(error)}): {excerpt(body)}") from error


def _parse_part(output_ids: Any, meta: dict[str, Any]) -> CompletionPart:
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {reason!r}")
    if type(output_ids) is not list or set(map(type, output_ids)) - {int}:
        raise ValueError("output_ids are not a list of token ids")
    if output_ids and not -TOKEN_LIMIT <= min(output_ids) <= max(output_ids) < TOKEN_LIMIT:
        raise ValueError(f"output_ids lie in [{min(output_ids)}, {max(output_ids)}], beyond 32 bits")
    if not output_ids and reason == "abort":
        return CompletionPart([], [], [], reason)
    scored = meta["output_token_logprobs"]
    if wrong := {type(entry[0]) for entry in scored} - {float, int, NoneType}:
        raise ValueError(f"a log-prob is of type {wrong.pop().__name__}")
    logprobs = [math.nan if entry[0] is None else float(entry[0]) for entry in scored]  # null: not finite
    versions: list[int] = []
    consistent = [entry[1] for entry in scored] == output_ids and not any(value > MOST_LOGPROB for value in logprobs)
    for span in meta["weight_versions"]:
        start, end, version = span["start"], span["end"], version_of(span["version"])
        if type(start) is not int or type(end) is not int:
            raise ValueError(f"weight version {version} has the range {start!r} to {end!r}, not integers")
        consistent = consistent and start == len(versions) and end <= len(output_ids)
        if consistent:  # an end that is wrong may be a huge number
            versions += [version] * (end - start)
    if not consistent or len(versions) != len(output_ids):
        count = len(output_ids)
        most = max(logprobs, default=math.nan)
        log.warning(
            "a completion of %d tokens with %d log-probs, at most %g, and %d versions",
            count, len(scored), most, len(versions),
        )  # fmt: skip
        return CompletionPart(output_ids, [math.nan] * count, [-1] * count, reason)
    return CompletionPart(output_ids, logprobs, versions, reason)


def _with_routes(each: tuple[CompletionPart, Any, int, int], shape: RouteShape) -> CompletionPart:
    """Adds the routes of an answer to its part; a part without tokens has none."""
    part, answer, length, index = each
    if not part.tokens:
        return part
    try:
        routes = shape.parse(answer["meta_info"].get("routed_experts"), length + len(part.tokens))
    except ValueError as error:
        raise ValueError(f"completion {index}: {error}") from error
    return dataclasses.replace(part, routes=routes)


def version_of(label: Any) -> int:
    """Parses the number that a server labels its weights with. Raises ValueError if it is no number."""
    if not isinstance(label, str) or not label.isdecimal() or len(label) > VERSION_DIGITS:
        raise ValueError(f"weight version {label!r} is not a number")
    return int(label)


def named(error: BaseException) -> str:
    """An error's type and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def excerpt(body: bytes) -> str:
    """The start of an answer in one line, for error messages."""
    return visible(" ".join(body[:EXCERPT].decode(errors="replace").splitlines()))
