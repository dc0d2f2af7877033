"""The canary's verdicts on recorded answers. Real servers answer it in tests/e2e/test_wrong_weights.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl import cli
from megarl.algorithms import algorithm_of
from megarl.config import Config
from megarl.knobs import UserError
from megarl.observe.metrics import stats_tracker
from megarl.rollout.api import GenerationError
from megarl.trainer.inputs import Inputs
from megarl.trainer.rollouts.canary import Answers, Canary
from megarl.trainer.rollouts.rollout_driver import RolloutDriver
from megarl.trainer.rollouts.weight_sync import WeightSync
from megarl.types import GenerationHyperparameters, ModelResponse, PackedBatch

LOGPROB = -1.25
VERSION = 3


@pytest.fixture(autouse=True)
def own_figures() -> Iterator[None]:
    stats_tracker.export()
    yield
    stats_tracker.export()


class Letters:
    """A tokenizer of one id per letter, without a chat template."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


class Recorded:
    """A client whose servers have answered; keeps what they were asked. Covers no HTTP and no sampling."""

    max_sequence_tokens = 12

    def __init__(self, answers: Mapping[str, list[ModelResponse] | GenerationError]) -> None:
        self.answers = dict(answers)
        self.asked: list[tuple[list[str], list[list[int]], GenerationHyperparameters]] = []
        self.released = 0

    def probe(self, addresses: Sequence[str], prompts: list[list[int]], gconfig: GenerationHyperparameters) -> Any:
        self.asked.append((list(addresses), prompts, gconfig))
        return self.answers

    def release(self) -> None:
        self.released += 1


class Constant:
    """An actor to which every token is equally likely."""

    def compute_logp(self, batch: PackedBatch) -> Tensor:
        return torch.where(batch["loss_mask"], LOGPROB, 0.0)


def configured(*overrides: str) -> Config:
    return cli.load(["+experiment=gsm8k_grpo", *overrides])


def canary_of(*overrides: str) -> Canary:
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("abc", "abcdefghijkl", "bc", "d", "e")]
    train: Any = SimpleNamespace(examples=rows)
    model: Any = SimpleNamespace(vocab_size=50)
    return Canary(configured(*overrides), Inputs(model, Letters(), train))


def responses(*gaps: float, version: int = VERSION, token: int = 7) -> list[ModelResponse]:
    """Two completions. Their tokens' log-probs differ from the actor's by `gaps`, split between them."""
    half = (len(gaps) + 1) // 2
    return [
        ModelResponse([1, 2, 3], [token] * len(part), [LOGPROB + gap for gap in part], [version] * len(part))
        for part in (gaps[:half], gaps[half:])
    ]


def verdict_on(canary: Canary, **servers: list[ModelResponse] | GenerationError) -> dict[str, str]:
    client: Any = Recorded(servers)
    return canary.compare(canary.ask(client, list(servers), VERSION), Constant(), VERSION)


def test_a_server_beyond_a_bound_is_named_with_its_figures_and_the_others_are_not() -> None:
    wrong = verdict_on(canary_of(), a=responses(0.01, -0.02, 0.0, 0.9), b=responses(0.2, 0.2, -0.2, 0.1))
    assert list(wrong) == ["a", "b"]  # 0.23 and 0.175 on average
    wrong = verdict_on(canary_of(), a=responses(*[0.01] * 3, 0.3), b=responses(*[0.01] * 30, -1.2))
    assert list(wrong) == ["b"]
    assert (
        "server b does not compute what the trainer does: at version 3, log-probs of 31 tokens differ by" in wrong["b"]
    )
    assert "by 0.0484 on average and 1.2 at worst, and reshard.max_logprob_diff=0.1 on average and" in wrong["b"]
    assert "reshard.max_token_logprob_diff=1 for one token are allowed" in wrong["b"]
    figures = stats_tracker.export()
    assert figures["canary_logprob_diff_max"] == pytest.approx(1.2, abs=1e-6)
    assert figures["canary_logprob_diff_mean"] == pytest.approx((0.2325 + 0.175 + 0.0825 + 1.5 / 31) / 4, abs=1e-6)


@pytest.mark.parametrize(
    ("gaps", "overrides", "found"),
    [
        ((0.09, -0.09), (), False),
        ((0.11, -0.11), (), True),
        ((0.11, -0.11), ("reshard.max_logprob_diff=0",), False),
        ((5.0, 0.0), ("reshard.max_logprob_diff=0", "reshard.max_token_logprob_diff=0"), False),
        ((math.nan, 0.0), ("reshard.max_logprob_diff=0", "reshard.max_token_logprob_diff=0"), True),
        ((0.0, 0.0), ("deterministic=true",), False),
        ((0.0, 1e-6), ("deterministic=true",), True),
    ],
)
def test_the_bounds_are_the_knobs_and_a_number_is_needed(
    gaps: tuple[float, ...], overrides: tuple[str, ...], found: bool
) -> None:
    assert bool(verdict_on(canary_of(*overrides), a=responses(*gaps))) == found


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (responses(0.0, 0.0, version=2), "its tokens are of version 2"),
        (responses(0.0), "a completion is empty"),
        (responses(0.0, 0.0, token=50), "it samples token 50, outside the vocabulary of 50"),
        (GenerationError("a answered 500: no memory"), "a answered 500: no memory"),
    ],
)
def test_a_server_whose_answer_cannot_be_compared_is_beyond_the_bounds(answer: Any, says: str) -> None:
    wrong = verdict_on(canary_of(), a=answer, b=responses(0.0, 0.0))
    assert wrong == {"a": f"server a does not answer the canary of version 3: {says}"}
    assert list(verdict_on(canary_of(), a=answer)) == ["a"]  # with no completion at all


def test_the_prompts_are_the_first_ones_cut_to_leave_room_for_completions() -> None:
    canary = canary_of("reshard.canary_prompts=2")
    assert canary.prompts(12) == [[0, 1, 2], [0, 1, 2, 3]]
    assert canary.prompts(None) == [[0, 1, 2], list(range(12))]


def test_tokens_are_sampled_from_the_distribution_that_the_trainer_scores() -> None:
    canary, client = canary_of("gconfig.temperature=0.7", "actor.temperature=0.7", "gconfig.top_p=0.9"), Recorded({})
    answered: Any = client
    assert canary.ask(answered, ["a"], VERSION) == Answers({}, {})
    ((addresses, prompts, gconfig),) = client.asked
    assert (addresses, len(prompts)) == (["a"], 4)
    assert (gconfig.temperature, gconfig.top_p, gconfig.top_k, gconfig.greedy) == (0.7, 1.0, -1, False)
    assert (gconfig.max_new_tokens, gconfig.min_new_tokens) == (8, 0)


@pytest.mark.parametrize("knob", ["canary_prompts", "max_logprob_diff", "max_token_logprob_diff"])
def test_negative_values_are_refused(knob: str) -> None:
    with pytest.raises(UserError, match=f"reshard.{knob}=-1(.0)? must be at least 0"):
        configured(f"reshard.{knob}=-1")


class Policy:
    """A driver on rank 0, with servers `a`, `b` and `c` of which `dead` have died."""

    def __init__(self, on_failure: str, dead: Sequence[str], *overrides: str) -> None:
        config = configured(f"reshard.on_failure={on_failure}", *overrides)
        inputs: Any = SimpleNamespace(train=object(), tokenizer=None)
        folder: Any = None
        self.weights = WeightSync(config, folder, is_rank0=False)
        self.driver = RolloutDriver(config, folder, inputs, algorithm_of(config.algorithm), self.weights)
        self.healthy, self.serving = ["a", "b", "c"], ["a", "b", "c"]
        self.client = Recorded({})
        supervisor = SimpleNamespace(died=lambda address: address in dead, after_sync=self._serve)
        rank0: Any = SimpleNamespace(engine=self.client)
        servers: Any = SimpleNamespace(supervisor=supervisor)
        session: Any = SimpleNamespace(healthy=self.healthy, remove=self.healthy.remove)
        self.driver._rank0, self.weights._rank0, self.weights._session = rank0, servers, session

    def _serve(self, healthy: list[str]) -> None:
        assert not self.client.released, "answers are handed over before the server is out of service"
        self.serving = list(healthy)


@pytest.mark.parametrize(
    ("on_failure", "wrong", "dead", "error", "serving"),
    [
        ("stop", "b", "", "b is wrong", "abc"),
        ("stop", "bc", "", "b is wrong (the same holds for c)", "abc"),
        ("stop", "b", "b", "", "abc"),  # the supervisor takes a dead server out of service itself
        ("drop_server", "b", "", "", "ac"),
        ("drop_server", "abc", "", "a is wrong (the same holds for b, c)", "abc"),
        ("drop_server", "", "", "", "abc"),
    ],
)
def test_a_live_server_is_left_out_or_stops_the_run_by_the_knob(
    on_failure: str, wrong: str, dead: str, error: str, serving: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Policy(on_failure, dead)
    assert policy.driver._leave_out({address: f"{address} is wrong" for address in wrong}) == error
    assert policy.serving == list(serving)
    assert policy.client.released == (not error)
    left_out = 3 - len(serving)
    assert stats_tracker.export().get("canary_left_out", 0) == left_out
    assert [r.message for r in caplog.records] == ["b is wrong; going on without b"] * left_out


def test_a_co_located_server_stops_the_run_under_either_policy() -> None:
    policy = Policy("drop_server", "", "server.colocate=true", "server.n_servers=1")
    assert policy.driver._leave_out({"b": "b is wrong"}) == "b is wrong"
    assert (policy.serving, policy.client.released) == (["a", "b", "c"], 0)
