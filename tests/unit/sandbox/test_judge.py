"""Statements about a program, judged outside of its process: honest programs, and forged verdicts."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from megarl.sandbox import check_statement
from megarl.sandbox.activity import worked_s
from megarl.sandbox.judge import HEADER, Channel, Remote

PROGRAM = """
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum
def add(a, b): return a + b
def boom(kind, text): raise kind(text)
class Mine(ValueError): pass
def own_error(): raise Mine('mine')
def sort(a): a.sort()
def rotate(m): m[:] = [list(r) for r in zip(*m[::-1])]
def grow(d, s): d['new'] = 1; s.add(2)
def apply(f, *xs, **named): return [f(x, **named) for x in xs]
def make_adder(n): return lambda x: x + n
def count(): yield from (1, 2, 3)
def echo(x): return x
def nothing(): pass
Point = namedtuple('Point', 'x y')
class Color(IntEnum): RED = 1
class Stack:
    size = 0
    def __init__(self, *items): self.items = list(items)
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
    def __iter__(self): return iter(self.items)
    def __add__(self, other): return Stack(*self.items, *other.items)
    def __eq__(self, other): return self.items == other.items
    def __lt__(self, other): return self.items < other.items
    def __neg__(self): return Stack(*reversed(self.items))
    def __repr__(self): return f'Stack{self.items}'
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def total(node): return node.value + (total(node.next) if node.next else 0)
counter = 0
def tick():
    global counter
    counter += 1
"""

HOLDS = [
    "assert add(1, 2) == 3",
    "assert add(2**100, 1) == 2**100 + 1",
    "assert add(0.1, 0.2) == 0.1 + 0.2 and add(float('inf'), 1) == float('inf')",
    "assert add('a', 'ü\\ud800') == 'aü\\ud800'",
    "assert add([1], [(2, {3: {4}})]) == [1, (2, {3: {4}})]",
    "assert echo({(1, 2): b'x', None: frozenset({1})}) == {(1, 2): b'x', None: frozenset({1})}",
    "from fractions import Fraction; assert add(Fraction(1, 3), Fraction(2, 3)) == 1",
    "from decimal import Decimal; assert echo(Decimal('0.10')) == Decimal('0.1')",
    "import datetime; d = datetime.date(2020, 2, 28); assert add(d, datetime.timedelta(1)).day == 29",
    "from collections import deque; assert echo(deque([1, 2])) == deque([1, 2])",
    "assert echo(range(3)) == range(3) and echo(1j) == 1j and echo(bytearray(b'x')) == b'x'",
    "assert nothing() is None and echo(True) is True and type(echo(1)) is int",
    "assert math.isclose(add(0.1, 0.2), 0.3)",
    "assert sorted(add([3], [1])) == [1, 3] and sum(map(add, [1, 2], [3, 4])) == 10",
    "a = [3, 1, 2]; sort(a); assert a == [1, 2, 3]",
    "m = [[1, 2], [3, 4]]; rotate(m); assert m == [[3, 1], [4, 2]]",
    "d, s = {}, {1}; grow(d, s=s); assert d == {'new': 1} and s == {1, 2}",
    "assert apply(lambda x: x * 2, 1, 2) == [2, 4]",
    "def f(x, by): return x * by\nassert apply(f, 1, 2, by=3) == [3, 6]",
    "assert apply(lambda x: add(x, 1), 1) == [2]",
    "assert make_adder(2)(3) == 5 and apply(make_adder(1), 1) == [2]",
    "assert list(count()) == [1, 2, 3] and 2 in count() and [x for x in count() if x > 1] == [2, 3]",
    "g = count(); assert next(g) == 1 and next(g) == 2",
    "try:\n    boom(KeyError, 'k')\n    assert False\nexcept KeyError as e:\n    assert 'k' in str(e)",
    "try:\n    own_error()\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'mine'",
    "assert Counter('aab') == {'a': 2, 'b': 1} and Counter('aab').most_common(1) == [('a', 2)]",
    "assert isinstance(Counter('a'), dict) and isinstance(defaultdict(list), dict)",
    "assert Point(1, 2) == (1, 2) and Point(1, 2).y == 2",
    "assert Color.RED == 1 and Color.RED + 1 == 2 and 2 - Color.RED == 1",
    "s = Stack(1); assert s.push(2).push(3).pop() == 3 and len(s) == 2 and list(s) == [1, 2]",
    "assert Stack(5)[0] == 5 and Stack().size == 0",
    "assert Stack(1) + Stack(2) == Stack(1, 2) and Stack(1) < Stack(2) and Stack(1) != Stack(2) and not Stack()",
    "assert str(Stack(1)) == 'Stack[1]' and (-Stack(1, 2))[0] == 2 and isinstance(Stack(), Stack)",
    "s = Stack(); s.items = [7]; assert s.pop() == 7 and not isinstance(3, Stack) and not isinstance(s, list)",
    "n = Node(1, Node(2)); n.next.next = Node(3); assert total(n) == 6 and n.next.next.next is None",
    "tick(); tick(); assert counter == 2",
    "def check(candidate):\n    assert candidate(1, 1) == 2\n    assert candidate('a', 'b') == 'ab'\ncheck(add)",
    "class Case:\n    def run(self): return add(1, 1)\nassert Case().run() == 2",
    "assert len({Stack(1): 1}) == 1",
]


@pytest.mark.parametrize("statement", HOLDS)
def test_a_true_statement_holds(statement: str) -> None:
    done = check_statement(PROGRAM, statement)
    assert done.ok, done


FAILS = {
    "assert add(1, 2) == 4": "AssertionError",
    "assert add(1) == 1": "TypeError",
    "assert missing(1)": "NameError: name 'missing' is not defined",
    "assert Stack(1) == [1]": "AssertionError",
    "assert Point(1, 2) == (1, 3)": "AssertionError",
    "assert not Stack(1)": "AssertionError",
    "boom(ZeroDivisionError, 'x')": "ZeroDivisionError: x",
    "add(1, )": "TypeError",
    "assert add(": "SyntaxError",
    "raise SystemExit(0)": "AssertionError: the statement ended before its end",
    "assert 1 in Stack()": "AssertionError",
    "assert Stack(1) + 1": "TypeError",
    "x = []; x.append(x); echo(x)": "RecursionError",
}


@pytest.mark.parametrize("statement", FAILS)
def test_a_false_statement_fails_with_its_reason(statement: str) -> None:
    done = check_statement(PROGRAM, statement)
    assert done.status == "failed"
    assert FAILS[statement] in done.stderr.strip().splitlines()[-1]


ANYTHING = """
class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __getattr__(self, name): return self
    def __call__(self, *arguments): return self
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __instancecheck__ = __lt__
    def __sub__(self, other): return 0.0
    __rsub__ = __add__ = __radd__ = __mul__ = __truediv__ = __pow__ = __mod__ = __and__ = __or__ = __xor__ = __sub__
    def __hash__(self): return 0
"""
FORGED = {  # programs that know nothing of the answer
    "equal to everything": ANYTHING + "def add(a, b): return Anything()",
    "equal to everything, as if an int": ANYTHING + "Anything.__class__ = property(lambda s: int)\n"
    "def add(a, b): return Anything()",
    "equal to everything, as an int": "class I(int):\n    __eq__ = lambda a, b: True\n    __hash__ = int.__hash__\n"
    "def add(a, b): return I(0)",
    "equal to everything, as a list": "class L(list):\n    __eq__ = lambda a, b: True\ndef add(a, b): return L()",
    "the function itself": ANYTHING + "add = Anything()",
    "ends with 0": "def add(a, b): exit(0)",
    "ends at once": "import os\ndef add(a, b): os._exit(0)",
    "ends before": "import os\nos._exit(0)",
    "ends by an exit function": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit",
    "by an exception": "def add(a, b): raise SystemExit",
    "by a generator": "def add(a, b):\n    yield",
    "replaced builtins": "import builtins\nbuiltins.AssertionError = Exception\nassert_ = abs = sorted = all = any = "
    "bool = isinstance = lambda *a: True\ndef add(a, b): return None",
    "patched modules": "import math, operator\nmath.isclose = operator.eq = lambda *a: True\ndef add(a, b): return 0",
    "frames": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        for v in ["
    "*f.f_locals.values(), *f.f_globals.values(), *f.f_code.co_consts]:\n"
    "            if v == int('42' * 2): return v\n        f = f.f_back",
    "all objects": "import gc\nsought = '=' * 2 + ' ' + '42' * 2\ndef add(a, b):\n    for o in "
    "gc.get_objects():\n        for r in gc.get_referents(o):\n            if type(r) in (str, bytes) and len(r) > 9 "
    "and sought in str(r): return int('42' * 2)",
    "own memory": "import re\ndef add(a, b):\n    maps = open('/proc/self/maps').read()",
    "the judge's files": "import os\ndef add(a, b):\n    for n in range(3, 64):\n        try: os.write(n, b'passed'); "
    "os.close(n)\n        except OSError: pass",
    "answers before it is asked": "import os, struct\nm = b'[\"value\", true, []]'\n"
    "os.write(5, (struct.pack('!I', len(m)) + m) * 9)\ndef add(a, b): return None",
    "a wrong answer": "import os\ndef add(a, b): os.write(5, bytes(1000))",
    "a huge answer": "import os\ndef add(a, b): os.write(5, b'\\xff' * 1000)",
    "asks to run code": "import os, struct\ndef say(m): os.write(5, struct.pack('!I', len(m)) + m)\ndef add(a, b):\n"
    '    say(b\'["ask", "call", [["stdlib", "os", "_exit"], [], 0]]\')\n'
    '    say(b\'["ask", "call", [["module", "os"], [], 0]]\')\n    say(b\'["ask", "getattr", [1, "real"]]\')\n'
    '    say(b\'["ask", "call", [["yours", -1], [], 0]]\')',
    "a module in place of a function": "import os as add",
    "a function of the library": "from os import _exit as add",
    "a mock": "from unittest.mock import MagicMock as add, ANY",
    "anything of the library": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "kills the judge": "import os, signal\ndef add(a, b):\n    for p in range(2, 100000):\n        try: os.kill(p, 9)\n"
    "        except OSError: pass",
    "too much": "def add(a, b): return 'x' * (100 * 2**20)",
    "too deep": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "changes what it was given": "def add(a, b): return (a, b)",
}
STATEMENTS = ["assert add(4000, 242) == 4242", "assert abs(add(4000.0, 242) - 4242) < 1e-6"]


@pytest.mark.parametrize("code", FORGED.values(), ids=FORGED)
def test_a_verdict_cannot_be_forged(code: str) -> None:
    for statement in STATEMENTS:
        done = check_statement(code, statement, time_limit_s=20.0)
        assert done.status in ("failed", "time", "output"), (statement, done)


def test_a_forged_module_is_not_asked() -> None:
    fake = "class math:\n    isclose = lambda *a: True\nimport sys\nsys.modules['math'] = math\ndef add(a, b): return 0"
    done = check_statement(fake, "import math\nassert math.isclose(add(1, 2), 3)")
    assert done.status == "failed"
    module = "import sys, math\nmath.isclose = lambda *a: True\ndef add(a, b): return 0"
    assert check_statement(module, "assert math.isclose(add(1, 2), 3)").status == "failed"
    instance = "import types\nmath = types.SimpleNamespace(isclose=lambda *a: True)\ndef add(a, b): return 0"
    for forged in (fake, instance):  # no module, and the statement does not import its own
        assert check_statement(forged, "assert math.isclose(add(1, 2), 3)").status == "failed"
        other = "text = '3'\nassert text.isdigit() and math.isclose(add(1, 2), 3)"  # an attribute that `math` lacks
        assert check_statement(forged, other).status == "failed"
    honest = "import math\ndef add(a, b): return 3.0"
    assert check_statement(honest, "assert math.isclose(add(1, 2), 3)").ok


def test_a_program_may_call_its_own_things_like_modules() -> None:
    assert check_statement("def bisect(a, b): return 7", "assert bisect(1, 2) == 7").ok
    stack = "class Stack(list):\n    def push(self, x): self.append(x)\nqueue = Stack()"
    assert check_statement(stack, "queue.push(3)\nassert queue.pop() == 3").ok


@pytest.mark.skipif(worked_s() == 0.0, reason="this kernel has no scheduler statistics, so sleep is not limited")
def test_a_program_that_loops_or_sleeps_costs_its_own_time() -> None:
    for code in ("def f():\n    while True: pass", "while True: pass"):
        assert check_statement(code, "f()", time_limit_s=0.5, wall_limit_s=300.0).status == "time"
    assert (
        check_statement("import time\ntime.sleep(1000)", "f()", time_limit_s=600.0, wall_limit_s=1.0).status == "wall"
    )
    for code in ("import time\ndef f(): time.sleep(1000)", "import time\ntime.sleep(1000)"):
        done = check_statement(code, "f()", time_limit_s=0.5, wall_limit_s=600.0)
        assert done.status == "sleep"
        assert done.sleep_s > 0.5
    swallow = "try:\n    f()\nexcept BaseException:\n    pass"
    assert check_statement("import os\ndef f(): os._exit(0)", swallow).status == "failed"


def test_a_program_may_call_functions_of_a_statement_and_nothing_else() -> None:
    spy = (
        "def peek(f):\n    out = []\n    for name in ('__globals__', '__code__', 'real'):\n        try: out.append(str("
        "getattr(f, name)))\n        except Exception as e: out.append(type(e).__name__)\n    return out"
    )
    assert check_statement(spy, "assert peek(lambda: 0) == ['AttributeError', 'AttributeError', 'PermissionError']").ok
    assert check_statement(spy, "assert peek(3)[2] == '3'").ok
    assert check_statement(
        "def run(f, x): return f(x)", "assert run(str, 1) == '1' and run(lambda x: [x], 2) == [2]"
    ).ok
    method = check_statement("def run(f): return f(1)", "assert run([].append) is None")
    assert "PermissionError" in method.stderr


@pytest.mark.parametrize(
    "message",
    [
        ["yours", 0],
        ["module", "os"],
        ["stdlib", "os", "system"],
        ["no such", 1],
        ["builtin", "eval"],
        ["Fraction", [1, 0]],
        ["int", 5],
        [],
        [[]],
    ],
)
def test_a_message_makes_data_or_fails(message: Any) -> None:
    with pytest.raises((ValueError, TypeError, IndexError, ZeroDivisionError)):
        Channel(-1, -1, judges=True).decode(message)


def test_data_passes_unchanged() -> None:
    channel = Channel(-1, -1, judges=True)
    for value in (
        None,
        True,
        -5,
        2**53,
        -(2**70),
        1e300,
        "x",
        [1, (2, {3}), {"a": b"b"}],
        frozenset({1}),
        1j,
        range(2, 9, 3),
    ):
        copy = channel.decode(json.loads(json.dumps(channel.encode(value))))
        assert copy == value
        assert type(copy) is type(value)
    assert type(channel.decode(channel.encode(object()))) is Remote


def test_a_channel_that_closes_ends_the_wait() -> None:
    reader, writer = os.pipe()
    os.write(writer, HEADER.pack(5) + b"12")
    os.close(writer)
    channel = Channel(reader, -1, judges=False)
    channel.serve()
    assert channel.gone
    os.close(reader)
