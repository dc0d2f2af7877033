"""What a request to a server says, field by field."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from megarl.rollout.api import GenerationError
from megarl.rollout.client.connections import Connections
from megarl.rollout.config import RolloutConfig


class Recorder:
    """Session that keeps the bodies of requests, and answers that the server is overloaded."""

    status = 503

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    @contextlib.asynccontextmanager
    async def post(self, url: str, data: bytes, headers: dict[str, str]) -> AsyncIterator[Recorder]:
        self.bodies.append(json.loads(data))
        yield self

    async def read(self) -> bytes:
        return b"overloaded"


@pytest.mark.parametrize(("adapter", "named"), [("", {}), ("math", {"lora_path": "math"})])
def test_a_request_names_the_adapter_that_it_samples_from(adapter: str, named: dict[str, str]) -> None:
    async def sent() -> list[dict[str, Any]]:
        connections, session = Connections(RolloutConfig(), None, adapter, None), Recorder()
        await connections.close()
        connections._session = session  # type: ignore[assignment]
        failure = await connections.generate("127.0.0.1:1", [[1, 2]], [{"n": 1}])
        assert failure == "127.0.0.1:1 answered 503: overloaded"
        return session.bodies

    fields = {"input_ids": [[1, 2]], "sampling_params": [{"n": 1}], "return_logprob": True}
    assert asyncio.run(sent()) == [{**fields, **named}]


def test_the_wait_before_each_retry_is_twice_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    async def sent() -> None:
        connections = Connections(RolloutConfig(max_retries=3, retry_delay_s=2.0), None, "", None)
        await connections.close()
        connections._session = Recorder()  # type: ignore[assignment]
        monkeypatch.setattr(asyncio, "sleep", wait)
        await connections.generate_with_retries("127.0.0.1:1", [[1, 2]], [{"n": 1}])

    with pytest.raises(GenerationError, match="answered 503: overloaded; that was attempt 4 of 4"):
        asyncio.run(sent())
    assert waits == [2.0, 4.0, 8.0]
