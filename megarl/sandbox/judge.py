"""Judges statements about a program from another process. Standard library only.

    judge's process:    runs `assert add(1, 2) == 3`; `add` is a `Remote`
        --ask call(add, 1, 2)-->    program's process: calls its own add(1, 2)
        <------ value 3 --------

Numbers, text, containers and a few types of the standard library are copied; nothing is ever unpickled. Other objects
stay where they are, and the judge holds a `Remote`. A program cannot answer for a comparison: a `Remote` never equals
data, and arithmetic or order between both raises TypeError. Two objects of the program compare by its own methods.

Names in a statement are its own, then Python's builtins, then the program's. A program that replaces `sorted` or `abs`
therefore changes nothing. A module of the standard library is imported by the judge itself, and so is what the
statement uses like one: `math` in `math.isclose(...)`, even if the program has its own `math`.
"""

from __future__ import annotations

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import json
import operator
import os
import struct
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

HEADER = struct.Struct("!I")
MAX_MESSAGE = 64 * 2**20
MAX_JSON_INT = 2**53
CONTAINERS: dict[str, type] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, bytearray, bytes, collections.deque)
}
BASES = (bool, int, float, str, bytes, bytearray, list, tuple, set, frozenset, dict)
# Values of the standard library by the arguments that make them again.
VALUES: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    complex: lambda value: (value.real, value.imag),
    range: lambda value: (value.start, value.stop, value.step),
    fractions.Fraction: lambda value: (value.numerator, value.denominator),
    decimal.Decimal: lambda value: (str(value),),
    datetime.date: lambda value: (value.year, value.month, value.day),
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
}
VALUE_TYPES = {kind.__name__: kind for kind in VALUES}
ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
)
ORDER = ("lt", "le", "gt", "ge")
UNARY = ("neg", "pos", "abs", "invert", "index")
FUNCTIONS = ("len", "str", "repr", "bool", "int", "float")


class Gone(BaseException):
    """Raised if the other process has ended. No `except Exception` of a statement catches it."""


class Channel:
    """A connection between a program and its judge. Each side may ask while it waits for an answer.

    `judges` is True in the judge's process. A statement's builtins, such as `int` or `KeyError`, become the program's
    own. A program's builtins stay with it: the judge must not call `eval` for a program that names it `add`.
    """

    def __init__(self, reader: int, writer: int, *, judges: bool) -> None:
        self.reader, self.writer, self.judges = reader, writer, judges
        self.objects: list[Any] = []  # which the other side knows by their place
        self.gone = False
        self.answer: Callable[[str, list[Any]], Any] = _call_only

    def ask(self, operation: str, *operands: Any) -> Any:
        """Asks the other side for an operation, and answers what it asks meanwhile.

        Raises:
            Exception: the operation raised there; the nearest builtin exception.
        """
        self._send(["ask", operation, [self.encode(operand) for operand in operands]])
        while True:
            kind, *content = self._receive()
            if kind == "ask":
                self._respond(*content)
            elif kind == "value":
                value, changed = content
                _change(operands, [self.decode(new) for new in changed])
                return self.decode(value)
            else:
                _raise_builtin(*content)

    def serve(self) -> None:
        """Answers until the other side closes."""
        while True:
            try:
                _, *content = self._receive()
            except Gone:
                return
            self._respond(*content)

    def _respond(self, operation: str, encoded: list[Any]) -> None:
        """Does an operation and sends its value, with the containers that it may have changed; or its exception."""
        try:
            operands = [self.decode(operand) for operand in encoded]
            value = self.encode(self.answer(operation, operands))
            changed = [self.encode(operand) for operand in _changeable(operands)]
            response: list[Any] = ["value", value, changed]
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            response = ["error", names, str(error)[:1000]]
        self._send(response)

    def encode(self, value: Any) -> Any:
        """Turns a value into JSON: data as it is, other objects as a place in `objects`."""
        kind = type(value)
        if value is None or kind in (bool, float, str) or (kind is int and abs(value) < MAX_JSON_INT):
            return value
        if kind is int:
            return ["int", hex(value)]
        if CONTAINERS.get(kind.__name__) is kind:
            return [kind.__name__, [self.encode(item) for item in value]]
        if kind is dict:
            return ["dict", [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if kind in VALUES:
            return [kind.__name__, [self.encode(item) for item in VALUES[kind](value)]]
        if kind is Remote:
            return ["yours", value._place]
        name = getattr(value, "__name__", None) if self.judges else None
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return ["builtin", name]
        base = next((base for base in BASES if isinstance(value, base)), None)
        self.objects.append(value)
        return ["mine", len(self.objects) - 1, [self.encode(base(value))] if base else []]

    def decode(self, message: Any) -> Any:
        """Turns JSON back into a value. Only types in this file are made.

        Raises:
            Exception: the message is none that `encode` writes.
        """
        if not isinstance(message, list):
            return message
        tag, content, *rest = message
        if tag == "int":
            return int(content, 16)
        if tag in CONTAINERS:
            return CONTAINERS[tag]([self.decode(item) for item in content])
        if tag == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if tag in VALUE_TYPES:
            return VALUE_TYPES[tag](*[self.decode(item) for item in content])
        if tag == "yours":
            return self.objects[content]
        if tag == "builtin" and not self.judges:
            return getattr(builtins, content)
        if tag == "mine":
            return Remote(self, content, [self.decode(base) for base in rest[0]])
        raise ValueError(f"no such tag: {tag!r}")

    def _send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        unsent = memoryview(HEADER.pack(len(data)) + data)
        try:
            while unsent:
                unsent = unsent[os.write(self.writer, unsent) :]
        except BrokenPipeError:
            self._end()

    def _receive(self) -> Any:
        (size,) = HEADER.unpack(self._read(HEADER.size))
        if size > MAX_MESSAGE:
            self._end()
        return json.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        parts = []
        while size > 0:
            part = os.read(self.reader, min(size, 65_536))
            if not part:
                self._end()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _end(self) -> NoReturn:
        self.gone = True
        raise Gone


class Remote:
    """An object of the other process. If its class extends a builtin one, `_base` holds a copy of that part."""

    def __init__(self, channel: Channel, place: int, base: list[Any]) -> None:
        for name, value in (("_channel", channel), ("_place", place), ("_base", base)):
            object.__setattr__(self, name, value)

    # `isinstance(Counter(), dict)` holds in the judge's process too.
    __class__ = property(lambda self: type(self._base[0]) if self._base else Remote)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return self._channel.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.ask("setattr", self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._channel.ask("call", self, list(named), *arguments, *named.values())

    def __eq__(self, other: object) -> bool:
        if type(other) is Remote and not (self._base or other._base):
            return self._place == other._place or self._channel.ask("eq", self, other) is True
        mine, theirs = _plain(self), _plain(other)
        return type(mine) is not Remote and type(theirs) is not Remote and bool(mine == theirs)

    def __hash__(self) -> int:
        return hash(self._base[0]) if self._base else hash(self._place)

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is Remote and self._channel.ask("isinstance", value, self) is True

    def __contains__(self, value: object) -> bool:
        return value in self._base[0] if self._base else any(value == item for item in self)

    def __iter__(self) -> Any:
        return self._channel.ask("iter", self)

    def __next__(self) -> Any:
        return self._channel.ask("next", self)

    def __getitem__(self, key: Any) -> Any:
        return self._channel.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._channel.ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._channel.ask("delitem", self, key)


def _plain(value: Any) -> Any:
    return value._base[0] if type(value) is Remote and value._base else value


def _add_operators() -> None:
    """Gives `Remote` the operators and conversions that Python looks up on the class."""

    def binary(name: str, swapped: bool) -> Callable[[Any, Any], Any]:
        function = getattr(operator, name)

        def method(self: Any, other: Any) -> Any:
            mine, theirs = _plain(self), _plain(other)
            if type(mine) is not Remote and type(theirs) is not Remote:
                return function(theirs, mine) if swapped else function(mine, theirs)
            if type(mine) is type(theirs):  # both are the program's
                return self._channel.ask(name, self, other)
            return NotImplemented

        return method

    def unary(name: str) -> Callable[[Any], Any]:
        return lambda self: self._channel.ask(name, self)

    for name in (*ARITHMETIC, *ORDER):
        setattr(Remote, f"__{name.rstrip('_')}__", binary(name, swapped=False))
    for name in ARITHMETIC:
        setattr(Remote, f"__r{name.rstrip('_')}__", binary(name, swapped=True))
    for name in (*UNARY, *FUNCTIONS):
        setattr(Remote, f"__{name}__", unary(name))


_add_operators()


def _call(function: Any, names: list[str], *operands: Any) -> Any:
    count = len(operands) - len(names)
    return function(*operands[:count], **dict(zip(names, operands[count:], strict=True)))


def _delete(container: Any, key: Any) -> None:
    del container[key]


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "delitem": _delete,
    "is_module": lambda value: isinstance(value, types.ModuleType),
    **{name: getattr(builtins, name) for name in ("getattr", "setattr", "isinstance", "iter", "next", *FUNCTIONS)},
    **{name: getattr(operator, name) for name in (*ARITHMETIC, *ORDER, *UNARY, "eq", "getitem", "setitem")},
}


def _call_only(operation: str, operands: list[Any]) -> Any:
    """Calls a function that the statement has handed to the program, which may ask for nothing else."""
    if operation != "call" or type(operands[0]) is not types.FunctionType:
        raise PermissionError("a program may only call functions of a statement")
    return _call(*operands)


def _changeable(operands: Any) -> list[Any]:
    return [operand for operand in operands if type(operand) in (list, dict, set, bytearray)]


def _change(operands: Any, new: list[Any]) -> None:
    """Repeats here what an operation changed in its containers there, such as a list that is sorted in place."""
    for before, after in zip(_changeable(operands), new, strict=True):
        if type(before) is not type(after):
            raise TypeError(f"a {type(before).__name__} came back as a {type(after).__name__}")
        if isinstance(before, list | bytearray):
            before[:] = after
        else:
            before.clear()
            before.update(after)


def _raise_builtin(names: list[str], text: str) -> NoReturn:
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(text)
    raise RuntimeError(text)


class _Names(dict[str, Any]):
    """Python's builtins, then the program's names. A module's name stands for the standard library's."""

    channel: Channel
    attributes: set[tuple[str, str]]  # ("math", "isclose") of each `math.isclose` in the statement

    def __missing__(self, name: str) -> Any:
        value = self.channel.ask("name", name)
        if name in sys.stdlib_module_names and type(value) is Remote and self._is_module(name, value):
            return importlib.import_module(name)  # not the program's, whose `math.isclose` may be true of anything
        return value

    def _is_module(self, name: str, value: Remote) -> bool:
        if self.channel.ask("is_module", value) is True:
            return True
        used = [attribute for owner, attribute in self.attributes if owner == name]
        return bool(used) and all(hasattr(importlib.import_module(name), attribute) for attribute in used)


def judge(statement: str, channel: Channel) -> None:
    """Runs a statement about the program at the other end.

    Raises:
        BaseException: it does not hold. Gone: the program ended.
    """
    names = _Names(vars(builtins))
    names.channel = channel
    tree = ast.parse(statement, "<test>")
    names.attributes = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    try:
        exec(compile(tree, "<test>", "exec"), {"__name__": "<test>", "__builtins__": names})
    except SystemExit as error:
        raise AssertionError("the statement ended before its end") from error
    if channel.gone:  # a bare `except` of the statement
        raise Gone


def serve(channel: Channel, namespace: dict[str, Any]) -> None:
    """Answers the judge with operations on the program's objects, until it closes."""

    def answer(operation: str, operands: list[Any]) -> Any:
        return namespace[operands[0]] if operation == "name" else OPERATIONS[operation](*operands)

    channel.answer = answer
    channel.serve()
