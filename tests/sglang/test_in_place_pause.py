"""In-place pauses of a server whose loop overlaps: tokens keep the version that sampled them, and the server lives.

SGLang's loop overlaps on GPUs, and on CPUs with several ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weights_support import PROMPT, TOLERANCE, Served, logprobs, weights_of

from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.reshard.transfer.store import Deadline
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServers
from tests import forked_servers
from tests.sglang.tiny_models import make_model

WATCHDOG_S = 80.0  # the watchdog looks every half of it, and ends the server 5 s after it has found no progress
TOKENS = 450


@pytest.fixture(scope="module")
def served(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two ranks, paused in place by its session."""
    config = SGLangServerConfig(device="cpu", max_total_tokens=16384, tp_size=2)
    folder, checkpoint = tmp_path_factory.mktemp("logs"), tiny_checkpoint("qwen3")
    servers = SGLangServers(config, checkpoint, folder, WEIGHT_LOADER, {"watchdog_timeout": WATCHDOG_S})
    with servers:
        with forked_servers.used():
            servers.start()
        servers.wait_ready()
        yield Served(servers, pause_mode="in_place")


class Answer:
    """A completion of `TOKENS` tokens, which has begun when `began` is set."""

    def __init__(self, served: Served) -> None:
        self.began = threading.Event()
        self._parts: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._ask, args=(served,))
        self._thread.start()

    def _ask(self, served: Served) -> None:
        self._parts.append(served.stream(TOKENS, PROMPT, lambda version: self.began.set()))

    def meta(self) -> dict[str, Any]:
        self._thread.join(300)
        return dict(self._parts[0]["meta_info"], output_ids=self._parts[0]["output_ids"])


def test_a_step_under_way_at_the_pause_is_labelled_by_the_weights_that_sampled_it(served: Served) -> None:
    """The last token of a version is the old weights', the next one is not. Later ones follow stale caches."""
    old = make_model("qwen3", True, seed=300)
    served.push(weights_of(old))
    for seed in range(301, 320):
        answer = Answer(served)
        assert answer.began.wait(300)
        new = make_model("qwen3", True, seed)
        served.push(weights_of(new))
        meta = answer.meta()
        if len(meta["weight_versions"]) == 2:  # else it ended before the pause
            break
        old = new
    first, second = meta["weight_versions"]
    assert [int(span["version"]) for span in (first, second)] == [served.version - 1, served.version]
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], TOKENS)
    output = torch.tensor([value for value, _, _ in meta["output_token_logprobs"]])
    by_old = logprobs(old, PROMPT + meta["output_ids"])[len(PROMPT) - 1 :]
    gaps = (output - by_old).abs()
    assert gaps[: first["end"]].max() < TOLERANCE
    assert gaps[first["end"]] > TOLERANCE, "the old weights sampled this token, and the new version labels it"


@pytest.mark.long
def test_a_pause_longer_than_sglangs_watchdog_waits_ends_no_server(served: Served) -> None:
    answer = Answer(served)
    assert answer.began.wait(300)
    served.control().call("/pause_generation", {"mode": "in_place"}, Deadline(120))
    time.sleep(1.5 * WATCHDOG_S + 8)
    served.control().call("/continue_generation", {}, Deadline(120))
    assert len(answer.meta()["output_ids"]) == TOKENS
    served.servers.check_alive()
