"""Keys of the prefix cache, by stand-ins of SGLang's classes. tests/sglang/test_in_place_pause.py has real servers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megarl.reshard.sync import sglang_hooks


class Request:
    def __init__(self, key: str | None):
        self.extra_key = key
        self.kv = SimpleNamespace(holds_kv=False)
        self.seen: list[str | None] = []

    def init_next_round_input(self, tree_cache: Any = None) -> None:
        self.seen.append(self.extra_key)


class Scheduler:
    def record_weight_version_change(self, new_version: str | None) -> None:
        """Changes nothing here."""

    def _add_request_to_queue(self, request: Request, is_retracted: bool = False) -> None:
        request.seen.append(request.extra_key)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A rank that has carried out its first order: its `scheduler`, and its class of a `request`."""
    request, scheduler = type("Req", (Request,), {}), type("Patched", (Scheduler,), {})
    contents = {
        "sglang.srt.managers.schedule_batch": {"Req": request},
        "sglang.srt.managers.scheduler": {"Scheduler": scheduler},
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", *contents):
        module = ModuleType(name)
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    sglang_hooks.share_caches_by_version.__wrapped__()
    return SimpleNamespace(scheduler=scheduler(), request=request)


def test_no_key_is_given_before_the_first_version(rank: SimpleNamespace) -> None:
    """Another rank may have failed to carry out the order, and would find other caches."""
    request = rank.request("own")
    rank.scheduler._add_request_to_queue(request)
    rank.scheduler.record_weight_version_change(None)  # an update without a version
    request.init_next_round_input()
    assert request.seen == ["own", "own"]


def test_a_request_is_queued_and_begun_under_the_version_of_that_moment(rank: SimpleNamespace) -> None:
    request = rank.request(None)
    rank.scheduler.record_weight_version_change("1")
    rank.scheduler._add_request_to_queue(request, is_retracted=True)
    rank.scheduler.record_weight_version_change("2")
    request.init_next_round_input(tree_cache=object())
    assert request.seen == ["weights 1|", "weights 2|"]


def test_the_request_s_own_key_and_its_adapter_stay_at_the_end(rank: SimpleNamespace) -> None:
    """SGLang reads an adapter's id from the last characters."""
    request = rank.request("team a" + 32 * "f")
    for version in ("1", "2"):
        rank.scheduler.record_weight_version_change(version)
        request.init_next_round_input()
    assert request.seen[-1] == "weights 2|team a" + 32 * "f"


def test_a_request_that_has_begun_keeps_its_key(rank: SimpleNamespace) -> None:
    """The next part of a long prompt belongs to the caches of the parts before it."""
    request = rank.request(None)
    rank.scheduler.record_weight_version_change("1")
    request.init_next_round_input()
    request.kv.holds_kv = True
    rank.scheduler.record_weight_version_change("2")
    request.init_next_round_input()
    assert request.seen == ["weights 1|", "weights 1|"]
