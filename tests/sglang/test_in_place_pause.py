"""In-place pauses of a server whose loop overlaps: tokens keep the version that sampled them, and the server lives.

SGLang's loop overlaps on GPUs, and on CPUs with several ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weights_support import PROMPT, TOLERANCE, Served, logprobs, weights_of

from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.reshard.transfer.store import Deadline
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServers
from tests import forked_servers
from tests.sglang.tiny_models import make_model

WATCHDOG_S = 80.0  # the watchdog looks every half of it, and ends the server 5 s after it has found no progress
SERVER_ARGS = {"watchdog_timeout": WATCHDOG_S, "max_running_requests": 1}
TOKENS = 450


@pytest.fixture(scope="module")
def served(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two ranks, paused in place by its session."""
    config = SGLangServerConfig(device="cpu", max_total_tokens=16384, tp_size=2)
    folder, checkpoint = tmp_path_factory.mktemp("logs"), tiny_checkpoint("qwen3")
    servers = SGLangServers(config, checkpoint, folder, WEIGHT_LOADER, SERVER_ARGS)
    with servers:
        with forked_servers.used():
            servers.start()
        servers.wait_ready()
        yield Served(servers, pause_mode="in_place")


class Answer:
    """A completion of `PROMPT`, which has begun when `began` is set."""

    def __init__(self, served: Served, tokens: int = TOKENS) -> None:
        self.began = threading.Event()
        self._parts: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._ask, args=(served, tokens))
        self._thread.start()

    def _ask(self, served: Served, tokens: int) -> None:
        self._parts.append(served.stream(tokens, PROMPT, lambda version: self.began.set()))

    def whole(self) -> dict[str, Any]:
        """The body of its last part, once it has ended."""
        self._thread.join(300)
        return self._parts[0]

    def versions(self) -> list[dict[str, Any]]:
        return list(self.whole()["meta_info"]["weight_versions"])


@dataclass
class Pause:
    """A sync during an answer: the models before and after it, the answer, and one that waited for its end."""

    old: nn.Module
    new: nn.Module
    running: Answer
    waiting: Answer


def pause_an_answer(served: Served) -> Pause:
    """Syncs until an answer is under way at the pause, and not at its end already."""
    old = make_model("qwen3", True, seed=300)
    served.push(weights_of(old))
    for seed in range(301, 320):
        running = Answer(served)
        assert running.began.wait(300)
        waiting = Answer(served, tokens=16)
        wait_in_queue(served, waiting)
        new = make_model("qwen3", True, seed)
        served.push(weights_of(new))
        if len(running.versions()) == 2:
            return Pause(old, new, running, waiting)
        waiting.whole()
        old = new
    pytest.fail("each answer ended before the pause")


def wait_in_queue(served: Served, waiting: Answer) -> None:
    """Waits until the scheduler has queued it, or has begun it, as the running one has ended."""
    deadline = Deadline(300)
    while not waiting.began.is_set():
        if served.control().call("/v1/loads", None, deadline)["loads"][0]["num_waiting_reqs"] == 1:
            return
        time.sleep(0.01)


def gaps(model: nn.Module, answer: dict[str, Any]) -> Tensor:
    """Distance of each sampled token's log-prob to the model's, in nats."""
    output = torch.tensor([value for value, _, _ in answer["meta_info"]["output_token_logprobs"]])
    return (output - logprobs(model, PROMPT + answer["output_ids"])[len(PROMPT) - 1 :]).abs()


def test_a_request_has_the_weights_and_the_caches_of_its_versions(served: Served) -> None:
    """An answer over a pause, one that waited for its end, and two later ones with the same prompt."""
    pause = pause_an_answer(served)
    first, second = pause.running.versions()
    assert [int(span["version"]) for span in (first, second)] == [served.version - 1, served.version]
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], TOKENS)
    by_old = gaps(pause.old, pause.running.whole())
    assert by_old[: first["end"]].max() < TOLERANCE
    assert by_old[first["end"]] > TOLERANCE, "the old weights sampled this token, and the new version labels it"
    assert [int(span["version"]) for span in pause.waiting.versions()] == [served.version]
    assert gaps(pause.new, pause.waiting.whole()).max() < TOLERANCE, "it has found caches of the old weights"
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 16}, "return_logprob": True}
    later = [served.control().call("/generate", body, Deadline(300)) for _ in range(2)]
    assert max(gaps(pause.new, answer).max() for answer in later) < TOLERANCE, "caches of the old weights"
    assert later[1]["meta_info"]["cached_tokens"] > 0, "requests of one version share caches"


@pytest.mark.long
def test_a_pause_longer_than_sglangs_watchdog_waits_ends_no_server(served: Served) -> None:
    answer = Answer(served)
    assert answer.began.wait(300)
    served.control().call("/pause_generation", {"mode": "in_place"}, Deadline(120))
    time.sleep(1.5 * WATCHDOG_S + 8)
    served.control().call("/continue_generation", {}, Deadline(120))
    assert len(answer.whole()["output_ids"]) == TOKENS
    served.servers.check_alive()
