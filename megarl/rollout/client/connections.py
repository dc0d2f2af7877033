"""HTTP to SGLang servers: one connection pool, one attempt of a request at one server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from megarl.knobs import UserError
from megarl.rollout.api import GenerationError, RequestRefused
from megarl.rollout.client.requests import CompletionPart, excerpt, named, parse_answer, version_of
from megarl.rollout.client.routes import RouteShape
from megarl.rollout.config import RolloutConfig

ADDRESSES_VARIABLE = "MEGARL_LLM_SERVER_ADDRS"
KEY_VARIABLE = "MEGARL_LLM_SERVER_API_KEY"
KEEPALIVE_S = 2.0  # below the 5 s of SGLang's uvicorn: the client must close an idle connection first


class Connections:
    """Connections to servers that share a key. Make and use them on one asyncio loop.

    Completions are asked of the servers' adapter of the name `adapter`, or of the base model if that is empty. With
    `routes` they have the experts of each token.
    """

    def __init__(
        self, config: RolloutConfig, api_key: str | None, adapter: str = "", routes: RouteShape | None = None
    ) -> None:
        self.config, self.adapter, self.routes = config, adapter, routes
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=config.max_connections, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=config.connect_timeout_s, sock_read=config.request_timeout_s
            ),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def check(self, address: str) -> None:
        """Raises UserError unless an SGLang server at `address` answers and labels its weights with a number."""
        try:
            async with self._session.get(f"http://{address}/model_info") as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UserError(
                f"no SGLang server answers at {address} ({named(error)}); start it, or correct {ADDRESSES_VARIABLE}"
            ) from error
        if status == 401:
            raise UserError(f"the SGLang server at {address} refuses the API key; set {KEY_VARIABLE}")
        try:
            label = json.loads(body)["weight_version"] if status == 200 else None
            version_of(label)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{address} answers /model_info with {status} {excerpt(body)}: it must be an SGLang server, "
                "started with --weight-version 0"
            ) from error
        if self.routes is not None:
            await self._check_returns_routes(address)

    async def _check_returns_routes(self, address: str) -> None:
        """Raises UserError unless the server records the experts of its tokens."""
        async with self._session.get(f"http://{address}/server_info") as response:
            status, body = response.status, await response.read()
        try:
            records = status == 200 and json.loads(body)["enable_return_routed_experts"] is True
        except (ValueError, KeyError, TypeError):
            records = False
        if not records:
            raise UserError(
                f"algorithm.routing_replay=rollout needs the server's choice of experts, and {address} does not return "
                "it; start it with --enable-return-routed-experts, or set routing_replay=off"
            )

    async def generate(
        self, address: str, inputs: Sequence[list[int]], params: Sequence[dict[str, Any]]
    ) -> list[CompletionPart] | str:
        """Makes one attempt. Returns the completions, or the failure if another attempt may succeed.

        Raises RequestRefused on a 4xx answer, GenerationError on one that is malformed or late.
        """
        headers = {"Content-Type": "application/json"}
        fields: dict[str, Any] = {"input_ids": inputs, "sampling_params": params, "return_logprob": True}
        if self.adapter:
            fields["lora_path"] = self.adapter
        if self.routes is not None:
            fields["return_routed_experts"] = True
        body = orjson.dumps(fields)
        try:
            async with self._session.post(f"http://{address}/generate", data=body, headers=headers) as response:
                status, answer = response.status, await response.read()
        except aiohttp.SocketTimeoutError as error:
            limit = f"rollout.request_timeout_s={self.config.request_timeout_s:g} s"
            raise GenerationError(f"{address} did not answer within {limit}") from error
        except (aiohttp.ClientError, OSError) as error:
            return f"the connection to {address} failed ({named(error)})"
        if status == 200:
            return parse_answer(answer, len(params), address, self.routes, [len(ids) for ids in inputs])
        failure = f"{address} answered {status}: {excerpt(answer)}"
        if status < 500:
            raise RequestRefused(failure)
        return failure

    async def generate_with_retries(
        self, address: str, inputs: Sequence[list[int]], params: Sequence[dict[str, Any]]
    ) -> list[CompletionPart]:
        """`generate` at one server, up to `rollout.max_retries` times more. Raises GenerationError on failure."""
        for attempt in range(self.config.max_retries + 1):
            if attempt:
                await asyncio.sleep(self.config.retry_delay_s * 2 ** (attempt - 1))
            answer = await self.generate(address, inputs, params)
            if not isinstance(answer, str):
                return answer
        raise GenerationError(f"{answer}; that was attempt {attempt + 1} of {attempt + 1}")


def plain_address(address: str) -> str:
    """`host:port` of an address or URL."""
    return address.strip().removeprefix("http://").rstrip("/")


def addresses_in_environment() -> list[str]:
    """The servers in MEGARL_LLM_SERVER_ADDRS; [] if it is not set."""
    return [plain_address(a) for a in os.environ.get(ADDRESSES_VARIABLE, "").split(",") if a.strip()]
