"""A server on loopback that speaks SGLang's `/generate` and fails in ways the real one cannot be asked to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from megarl.rollout.executor import LoopThread

Reply = Callable[[dict[str, Any], web.Request], Awaitable[web.StreamResponse]]


def answer(ids: list[int], version: str = "0", reason: str = "length") -> dict[str, Any]:
    """One completion in the form of SGLang's answer. The log-prob of a token is minus a hundredth of its id."""
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-i / 100, i, None] for i in ids],
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
        },
    }


def respond(answers: list[dict[str, Any]]) -> web.Response:
    """The answer as SGLang writes it: what is not finite as null."""
    return web.Response(body=orjson.dumps(answers), content_type="application/json")


def tokens_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """A full answer: each completion counts up from the last token of its prompt."""
    return [
        answer(list(range(ids[-1] + 1, ids[-1] + 1 + params["max_new_tokens"])))
        for ids, params in zip(body["input_ids"], body["sampling_params"], strict=True)
    ]


class Server:
    """Answers by `reply(body, request)`; keeps the bodies it was sent."""

    def __init__(self, thread: LoopThread, reply: Reply, model_info: web.Response | None = None):
        self.bodies: list[dict[str, Any]] = []
        self.cancelled = 0
        self._thread = thread
        self._reply = reply
        self._model_info = model_info
        self._runner: web.AppRunner | None = None
        self.address = thread.run(self._start(), 300, "starting the test server")

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/model_info", self._info)
        app.router.add_post("/generate", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0]
        return f"{host}:{port}"

    async def _info(self, request: web.Request) -> web.StreamResponse:
        return self._model_info or web.json_response({"weight_version": "0"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        try:
            return await self._reply(body, request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def stop(self) -> None:
        assert self._runner is not None
        self._thread.run(self._runner.cleanup(), 300, "stopping the test server")
