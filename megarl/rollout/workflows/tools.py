"""Tools that a model may call: each is `tool(**arguments) -> str`, with its JSON schema for the chat template."""

from __future__ import annotations

import ast
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.sandbox import run_python

MAX_EXPRESSION = 200  # characters
MAX_POWER_BITS = 4096  # of a power's result
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call, and its description for the chat template."""

    name: str
    meaning: str
    parameters: dict[str, str]  # name to meaning; all are strings
    run: Callable[..., str]

    @property
    def schema(self) -> dict[str, Any]:
        """The description that chat templates take in `tools`."""
        properties = {name: {"type": "string", "description": meaning} for name, meaning in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.meaning, "parameters": parameters}
        return {"type": "function", "function": function}


def python_tool(time_limit_s: float = 5.0, memory_limit_mb: int = 512) -> Tool:
    """Runs a program in a sandbox and answers with its output."""

    def run(code: str) -> str:
        result = run_python(code, time_limit_s=time_limit_s, memory_limit_mb=memory_limit_mb, output_limit=4096)
        if result.ok:
            return result.stdout
        last_line = result.stderr.strip().splitlines()[-1:] or [f"stopped: {result.status} limit"]
        return f"{result.stdout}{last_line[0]}"

    return Tool("python", "Runs a Python program and returns what it prints.", {"code": "the program"}, run)


def calculator_tool() -> Tool:
    """Numbers, + - * / // % ** and parentheses; nothing is executed."""

    def run(expression: str) -> str:
        try:
            return f"{_value(ast.parse(expression[:MAX_EXPRESSION], mode='eval').body):.12g}"
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            return f"error: {error}"

    return Tool("calculator", "Computes an arithmetic expression.", {"expression": "such as (2+3)*4"}, run)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) * math.log2(max(abs(left), 2)) > MAX_POWER_BITS:
            raise ValueError("the power is too large")
        result = _BINARY[type(node.op)](left, right)
        if isinstance(result, complex) or abs(result) > 1e300:
            raise ValueError("the result is no number of ordinary size")
        return float(result) if isinstance(result, float) else result
    raise ValueError("only numbers, + - * / // % ** and parentheses are understood")


def search_tool(corpus: Sequence[str], results: int = 3) -> Tool:
    """The passages of a local corpus nearest to a query, by BM25 (Robertson and Zaragoza 2009)."""
    k1, b = 1.2, 0.75
    passages = [Counter(text.lower().split()) for text in corpus]
    lengths = [sum(words.values()) for words in passages]
    average = sum(lengths) / max(len(lengths), 1)
    passages_with = Counter(word for words in passages for word in words)

    def run(query: str) -> str:
        scores = [0.0] * len(passages)
        for word in set(query.lower().split()):
            rarity = math.log(1 + (len(passages) - passages_with[word] + 0.5) / (passages_with[word] + 0.5))
            for i, words in enumerate(passages):
                if count := words[word]:
                    scores[i] += rarity * count * (k1 + 1) / (count + k1 * (1 - b + b * lengths[i] / average))
        best = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: (-scores[i], i))[:results]
        return "\n".join(corpus[i] for i in best) or "nothing found"

    return Tool("search", "Finds passages in the corpus.", {"query": "words to look for"}, run)
