"""Tools of an MCP server, over stdio or HTTP: the policy calls them until it answers without a call.

The server gives no reward; `rewards.functions` score the last answer.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from megarl.environments.base import Environment, Message, Step, package
from megarl.environments.tool_calls import CALL, CALL_ERROR, parse_call

PIN = "mcp==2.3.0"


def require() -> None:
    """Refuses an interpreter without the MCP client."""
    package("mcp", PIN)


def build(command: Sequence[str], url: str, key_variable: str, max_result_chars: int) -> Environment:
    """A session with the server that `command` starts, where python is this interpreter, or with the one at `url`."""
    mcp = package("mcp", PIN)
    if command:
        program = sys.executable if command[0] == "python" else command[0]
        server: Any = mcp.StdioServerParameters(command=program, args=list(command[1:]), env=dict(os.environ))
    elif key_variable:
        http = package("httpx2", PIN).AsyncClient(
            headers={"Authorization": f"Bearer {os.environ[key_variable]}"}, follow_redirects=True
        )
        server = package("mcp.client.streamable_http", PIN).streamable_http_client(url, http_client=http)
    else:
        server = url
    return _Mcp(mcp.Client(server), max_result_chars)


class _Mcp(Environment):
    """Keeps its session open in a thread, where asyncio runs."""

    def __init__(self, client: Any, max_result_chars: int) -> None:
        self.client = client
        self.max_result_chars = max_result_chars
        self.loop = asyncio.new_event_loop()
        self.opened: Future[list[Any]] = Future()
        self.over = asyncio.Event()
        self.held: Future[None] = Future()
        threading.Thread(target=self._run, daemon=True).start()
        listed = self.opened.result()
        self.names = {tool.name for tool in listed}
        self.tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in listed
        ]
        if not self.tools:
            raise ValueError("the server has no tool")

    def _run(self) -> None:
        """Runs the session's loop to its end."""
        try:
            self.loop.run_until_complete(self._hold())
        except BaseException as error:
            self.held.set_exception(_first(error))
        else:
            self.held.set_result(None)

    async def _hold(self) -> None:
        """Opens the session, lists its tools and keeps it open until `close`."""
        try:
            async with self.client:
                tools: list[Any] = []
                cursor = None
                while cursor is not None or not tools:
                    page = await self.client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        break
                self.opened.set_result(tools)
                await self.over.wait()
        except BaseException as error:
            if self.opened.done():
                raise
            self.opened.set_exception(_first(error))

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def reset(self, row: dict[str, Any]) -> None:
        """Leaves the row's messages as they are."""

    def close(self) -> None:
        """Ends the session, and with it a server over stdio."""
        self.loop.call_soon_threadsafe(self.over.set)
        self.held.result()

    def step(self, answer: str) -> Step:
        calls = CALL.findall(answer)
        if not calls:
            return Step(done=True)
        results: list[Message] = [{"role": "tool", "content": self._call(call)} for call in calls]
        return Step(results)

    def _call(self, text: str) -> str:
        """The tool's result, or the reason why the call cannot be made."""
        call = parse_call(text)
        if call is None or not isinstance(call[1], dict):
            return CALL_ERROR
        name, arguments = call
        if not isinstance(name, str) or name not in self.names:
            return f"error: there is no tool {name}; there are {', '.join(sorted(self.names))}"
        result = self._wait(self.client.call_tool(name, arguments))
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        text = ("error: " if result.is_error else "") + "\n".join(parts)
        return text[: self.max_result_chars]


def _first(error: BaseException) -> BaseException:
    """The cause inside groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
