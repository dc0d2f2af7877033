"""Routes of a server's answers: decoded or refused, and joined over the parts and turns of a sequence."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from megarl.rollout.api import GenerationError
from megarl.rollout.client.requests import CompletionPart, Draft, parse_answer
from megarl.rollout.client.routes import RouteShape
from megarl.rollout.transcript import Transcript, pad_transcripts
from megarl.types import ROUTED_EXPERTS, GenerationHyperparameters, ModelRequest, ModelResponse, PackedBatch

SHAPE = RouteShape(layers=3, sparse=(0, 2), topk=2, experts=5)


def encoded(routes: Any) -> str:
    return base64.b64encode(np.asarray(routes, np.int32).tobytes()).decode()


def of_version(version: int, tokens: int) -> torch.Tensor:
    """Routes of a pass over `tokens` tokens; the first expert tells the pass."""
    return torch.tensor([[[version, 4]] * 2] * (tokens - 1), dtype=torch.int16).view(-1, 2, 2)


def passes(routes: torch.Tensor | None) -> list[int]:
    assert routes is not None
    return routes[:, 0, 0].tolist()


def test_routes_of_layers_with_experts_are_kept() -> None:
    rows = [[[0, 1], [0, 0], [4, 2]], [[3, 1], [0, 0], [2, 4]]]
    assert SHAPE.parse(encoded(rows), 3).tolist() == [[[0, 1], [4, 2]], [[3, 1], [2, 4]]]
    assert SHAPE.parse("", 1).shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, "no routed_experts for a sequence of 3 tokens: start the server with --enable-return-routed-experts"),
        ("??", "are not base64"),
        (encoded(np.zeros((1, 3, 2))), "have 24 bytes, and 2 tokens x 3 layers x 2 experts take 48"),
        (encoded([[[0, 1]] * 3, [[0, 5]] * 3]), "name expert 5 of 5"),
        (encoded([[[0, 1]] * 3, [[0, 0]] * 3]), "name an expert twice for a token; the server does not record them"),
    ],
)
def test_an_answer_without_its_routes_is_refused_by_completion(routes: str | None, message: str) -> None:
    good = encoded([[[0, 1]] * 3] * 2)

    def answer(value: str | None) -> dict[str, Any]:
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 7]],
            "weight_versions": [{"start": 0, "end": 1, "version": "0"}],
        }
        return {"output_ids": [7], "meta_info": meta | ({} if value is None else {"routed_experts": value})}

    whole = orjson.dumps([answer(good), answer(good)])
    assert all(part.routes is not None for part in parse_answer(whole, 2, "host:1", SHAPE, [2, 2]))
    assert all(part.routes is None for part in parse_answer(whole, 2, "host:1"))
    with pytest.raises(GenerationError, match=rf"host:1 .*completion 1: .*{message}"):
        parse_answer(orjson.dumps([answer(good), answer(routes)]), 2, "host:1", SHAPE, [2, 2])


def test_an_expert_may_not_come_twice_wherever_it_stands() -> None:
    with pytest.raises(ValueError, match="name an expert twice for a token"):
        RouteShape(layers=1, sparse=(0,), topk=3, experts=5).parse(encoded([[[4, 0, 4]]]), 2)


def test_a_partial_rollout_keeps_the_route_of_the_pass_that_sampled_the_next_token() -> None:
    draft = Draft()  # of a prompt of 3 tokens
    draft.add(CompletionPart([10, 11, 12], [-1.0] * 3, [0] * 3, "abort", of_version(0, 6)), 8)
    assert draft.tokens == [10, 11]  # the last one is sampled again
    assert passes(draft.routes) == [0, 0, 0, 0]  # of the prompt and token 10; token 11 is read again
    draft.add(CompletionPart([], [], [], "abort"), 8)
    assert draft.tokens == [10]
    assert passes(draft.routes) == [0, 0, 0]
    draft.add(CompletionPart([21, 22, 23], [-1.0] * 3, [1] * 3, "stop", of_version(1, 7)), 8)
    response = draft.response(ModelRequest([1, 2, 3]))
    assert response.output_tokens == [10, 21, 22, 23]
    assert passes(response.routed_experts) == [0, 0, 0, 1, 1, 1]


def test_an_abort_in_the_first_token_leaves_nothing() -> None:
    draft = Draft()
    draft.add(CompletionPart([10], [-1.0], [0], "abort", of_version(0, 4)), 8)
    assert not draft.tokens
    draft.add(CompletionPart([20], [-1.0], [1], "stop", of_version(1, 4)), 8)
    assert passes(draft.routes) == [0, 0, 1]  # the prompt's last token chose again


def test_turns_of_a_conversation_have_routes_but_for_tokens_that_no_server_read() -> None:
    transcript, gconfig = Transcript(), GenerationHyperparameters(max_new_tokens=8)
    request = transcript.ask([1, 2], gconfig, None)
    assert request is not None
    transcript.sample(ModelResponse(request.input_ids, [10, 11], [-1.0] * 2, [0] * 2, "stop", of_version(0, 4)))
    fork = transcript.copy()
    request = transcript.ask([3, 4, 5], gconfig, None)
    assert request is not None
    transcript.sample(ModelResponse(request.input_ids, [12], [-1.0], [1], "stop", of_version(1, 8)))
    transcript.give([6])
    padded = pad_transcripts([transcript, fork], [1.0, 0.0])
    batch = PackedBatch.from_padded(padded)
    first, second = batch.split(batch[ROUTED_EXPERTS])
    assert passes(first) == [0, 0, 0, 1, 1, 1, 1, -1, -1]
    assert passes(second) == [0, 0, 0, -1]
    assert batch[ROUTED_EXPERTS].dtype == torch.int16
    assert ROUTED_EXPERTS not in pad_transcripts([Transcript([1], [True], [0.0], [0])], [1.0])
