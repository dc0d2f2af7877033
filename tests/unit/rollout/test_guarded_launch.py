"""SGLang's key check as megarl wraps it. A real server's answers are in tests/sglang/test_server_requests.py."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket

from megarl.rollout.servers import guarded_launch


@pytest.fixture
def sglang() -> Path:
    """Folder of SGLang's server code."""
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        pytest.skip("SGLang is not installed: make setup installs it")
    return Path(package.origin).parent / "srt"


@pytest.fixture
def auth(sglang: Path) -> ModuleType:
    """SGLang's module of the key check, without the rest of SGLang, whose import takes seconds."""
    spec = importlib.util.spec_from_file_location("sglang_auth", sglang / "utils" / "auth.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sglang_auth"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def answers(app: FastAPI, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """What an ASGI server would send for a request without a body."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect" if scope["type"] == "websocket" else "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    base = {"path": "/v1/realtime", "query_string": b"", "headers": [], "server": ("127.0.0.1", 80), "scheme": "http"}
    asyncio.run(app({**base, **scope}, receive, send))
    return sent


def app_with_a_socket(add_middleware: Any) -> FastAPI:
    app = FastAPI()

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    @app.get("/v1/realtime")
    async def page() -> int:
        return 1

    add_middleware(app, api_key="key", admin_api_key=None)
    return app


def test_a_websocket_is_closed_before_it_is_accepted_and_http_needs_the_key(auth: ModuleType) -> None:
    socket, page = {"type": "websocket"}, {"type": "http", "method": "GET"}
    with_key = {**page, "headers": [(b"authorization", b"Bearer key")]}
    app = app_with_a_socket(guarded_launch.with_http_alone(auth.add_api_key_middleware))
    assert answers(app, socket) == [{"type": "websocket.close", "code": 1008}]
    assert answers(app, page)[0]["status"] == 401
    assert answers(app, with_key)[0]["status"] == 200
    unwrapped = app_with_a_socket(auth.add_api_key_middleware)
    assert answers(unwrapped, socket)[0]["type"] == "websocket.accept", "SGLang's own check has learnt it: drop ours"


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready", "/metrics", "/v1/realtime"])
def test_every_path_needs_the_key(path: str, auth: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "decide_request_auth", guarded_launch.key_everywhere(auth.decide_request_auth))
    app = app_with_a_socket(auth.add_api_key_middleware)
    for header in (b"", b"Bearer other", "Bearer k\u00e9y".encode("latin-1")):
        request = {"type": "http", "method": "GET", "path": path, "headers": [(b"authorization", header)]}
        assert answers(app, request)[0]["status"] == 401, header


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_k": 2**31}, r"top_k=2147483648 must be at most 2147483647"),
        ({"min_new_tokens": 2**40}, r"min_new_tokens=1099511627776 must be at most"),
        ({"min_new_tokens": 1, "stop_token_ids": [3, -5]}, r"stop_token_ids has -5; .* \[0, 10\)"),
        ({"min_new_tokens": 1, "stop_token_ids": [10]}, r"stop_token_ids has 10"),
        ({"stop_token_ids": [10**6, -1], "top_k": 2**31 - 1}, None),  # never an index
        ({"min_new_tokens": 1, "stop_token_ids": [0, 9]}, None),
    ],
)
def test_integers_that_end_a_scheduler_are_refused(params: dict[str, Any], message: str | None) -> None:
    """Each of the refused ended a server: SGLang's tensors have 32 bits, or an entry for each token."""
    request = SimpleNamespace(sampling_params=params)
    if message is None:
        guarded_launch.check_request(request, [1], 10)
    else:
        with pytest.raises(ValueError, match=message):
            guarded_launch.check_request(request, [1], 10)


def test_sglangs_watchdog_sees_no_batch_while_the_scheduler_is_paused(sglang: Path) -> None:
    """A real server's pause is in tests/sglang/test_in_place_pause.py."""
    seen: list[str] = []
    scheduler = SimpleNamespace(cur_batch_for_debug="batch")
    guarded_launch.idle_while_paused(lambda scheduler, request: seen.append(request))(scheduler, "in_place")
    assert (scheduler.cur_batch_for_debug, seen) == (None, ["in_place"])
    watchdog = (sglang / "managers" / "scheduler_components" / "invariant_checker.py").read_text()
    assert "scheduler.is_initializing or scheduler.cur_batch_for_debug is not None" in watchdog
