"""Tool calls in an answer: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the form of Qwen's templates."""

from __future__ import annotations

import json
import re
from typing import Any

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
CALL_ERROR = 'error: a call is {"name": ..., "arguments": {...}}'


def parse_call(text: str) -> tuple[Any, Any] | None:
    """Name and arguments of a call's JSON; None if it has another form."""
    try:
        request = json.loads(text)
        return request["name"], request.get("arguments", {})
    except (json.JSONDecodeError, TypeError, KeyError, AttributeError, RecursionError):
        return None
