"""Servers that fail on demand and engines connected to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web
from fault_server import Reply, Server, answer, tokens_of

from megarl.data.tokenizer import train_tokenizer
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.config import RolloutConfig
from megarl.rollout.executor import LoopThread


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """`start_server(reply=None, model_info=None)`; without `reply` it answers in full."""
    thread = LoopThread("test-server")
    servers: list[Server] = []

    async def in_full(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return web.json_response(tokens_of(body))

    def start(reply: Reply = in_full, model_info: web.Response | None = None) -> Server:
        servers.append(Server(thread, reply, model_info))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
    thread.stop()


@pytest.fixture
def connect() -> Iterator[Callable[..., RemoteSGLangEngine]]:
    """`connect(*servers, **knobs)`: an initialized engine with short delays."""
    engines: list[RemoteSGLangEngine] = []

    def make(*servers: Server, **knobs: Any) -> RemoteSGLangEngine:
        engine = RemoteSGLangEngine(RolloutConfig(**{"retry_delay_s": 0.01, "max_retries": 2} | knobs))
        engines.append(engine)
        engine.initialize([server.address for server in servers])
        return engine

    yield make
    for engine in engines:
        engine.destroy()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_tokenizer()


@pytest.fixture
def say(start_server: Callable[..., Server], connect: Callable[..., RemoteSGLangEngine], tokenizer: Any) -> Any:
    """`say(script)`: an engine whose server answers `script(prompt_text, sampling_params)`, ended with eos."""

    def make(script: Callable[[str, dict[str, Any]], str]) -> RemoteSGLangEngine:
        async def reply(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
            prompts = zip(body["input_ids"], body["sampling_params"], strict=True)
            texts = [script(tokenizer.decode(ids), params) for ids, params in prompts]
            return web.json_response(
                [answer([*tokenizer.encode(text), tokenizer.eos_token_id], reason="stop") for text in texts]
            )

        return connect(start_server(reply))

    return make
