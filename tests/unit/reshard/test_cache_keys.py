"""Keys of the prefix cache, by stand-ins of SGLang's classes. tests/sglang/test_in_place_pause.py has real servers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megarl.reshard.sync import sglang_hooks


class Request:
    def __init__(self, key: str | None, holds_kv: bool = False):
        self.extra_key = key
        self.kv = SimpleNamespace(holds_kv=holds_kv)
        self.seen: list[str | None] = []

    def init_next_round_input(self, tree_cache: Any = None) -> None:
        self.seen.append(self.extra_key)


class Queue:
    def _add_request_to_queue(self, request: Request, is_retracted: bool = False) -> None:
        request.seen.append(request.extra_key)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The server's `weight_version`; its classes are patched as in a scheduler."""
    served = SimpleNamespace(weight_version="1")
    contents = {
        "sglang.srt.managers.schedule_batch": {"Req": type("Req", (Request,), {})},
        "sglang.srt.managers.scheduler": {"Scheduler": type("Scheduler", (Queue,), {})},
        "sglang.srt.runtime_context": {"get_serving": lambda: served},
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", *contents):
        module = ModuleType(name)
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    sglang_hooks.share_caches_by_version.__wrapped__()
    served.request = contents["sglang.srt.managers.schedule_batch"]["Req"]
    served.scheduler = contents["sglang.srt.managers.scheduler"]["Scheduler"]()
    return served


def test_a_request_is_queued_and_begun_under_the_version_of_that_moment(served: SimpleNamespace) -> None:
    request = served.request(None)
    served.scheduler._add_request_to_queue(request, is_retracted=True)
    served.weight_version = "2"
    request.init_next_round_input(tree_cache=object())
    assert request.seen == ["weights 1|", "weights 2|"]


def test_the_request_s_own_key_and_its_adapter_stay_at_the_end(served: SimpleNamespace) -> None:
    """SGLang reads an adapter's id from the last characters."""
    request = served.request("team a" + 32 * "f")
    for version in ("1", "2"):
        served.weight_version = version
        request.init_next_round_input()
    assert request.seen[-1] == "weights 2|team a" + 32 * "f"


def test_a_request_that_has_begun_keeps_its_key(served: SimpleNamespace) -> None:
    """The next part of a long prompt belongs to the caches of the parts before it."""
    request = served.request(None)
    request.init_next_round_input()
    request.kv.holds_kv = True
    served.weight_version = "2"
    request.init_next_round_input()
    assert request.seen == ["weights 1|", "weights 1|"]
