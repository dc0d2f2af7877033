"""Mutants by operators on the syntax tree: a seeded sample of small changes to functions that tests call.

comparison   < and <=, == and !=, is and is not, in and not in
constant     an integer plus one
condition    the test of an if, while or conditional expression negated
statement    a call, an assignment to an attribute or item, or a raise left out
arguments    the first two arguments of a call swapped
junction     and for or
sign         + for -, * for /
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mutant import Mutant

SAMPLE = 120
FOLDERS = tuple(f"megarl/{name}" for name in ("algorithms", "actor", "rollout", "reshard", "rewards", "trainer"))

# Tests of several processes, whose calls are not recorded, and of other folders; of a file that begins like this, the
# first that fits.
SLOWER: dict[str, tuple[str, ...]] = {
    "megarl/actor/checkpoint/": ("tests/distributed/test_checkpoint.py", "tests/unit/trainer/test_saver.py"),
    "megarl/actor/health.py": ("tests/distributed/test_health.py",),
    "megarl/actor/model/moe.py": ("tests/distributed/test_moe.py",),
    "megarl/actor/model/attention/delta_net.py": ("tests/distributed/test_delta_net_layouts.py",),
    "megarl/actor/model/attention/windows_and_sinks.py": ("tests/distributed/test_window_layouts.py",),
    "megarl/actor/model/adapters.py": ("tests/distributed/test_lora_layouts.py",),
    "megarl/actor/mtp.py": ("tests/distributed/test_mtp_layouts.py",),
    "megarl/actor/critic.py": ("tests/distributed/test_critic_layouts.py",),
    "megarl/actor/checks.py": ("tests/unit/parallel/test_layout_checks.py",),
    "megarl/actor/distillation.py": ("tests/distributed/test_teacher_layouts.py",),
    "megarl/actor/engine.py": ("tests/distributed/test_layouts.py", "tests/distributed/test_teacher_layouts.py"),
    "megarl/actor/batch/rank_batches.py": (
        "tests/distributed/test_rank_batches.py",
        "tests/distributed/test_critic_layouts.py",
    ),
    "megarl/actor/model/routing.py": ("tests/distributed/test_replayed_experts.py",),
    "megarl/actor/": ("tests/distributed/test_layouts.py",),
    "megarl/rollout/servers/sglang_server.py": ("tests/sglang/test_server_requests.py", "tests/sglang/test_server.py"),
    "megarl/rollout/servers/served_adapters.py": ("tests/unit/reshard/test_sglang_adapters.py",),
    "megarl/reshard/": ("tests/nccl_semantics/test_weight_sync.py",),
}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
SYMMETRIC = ("max", "min")  # calls whose arguments may change places
QUIET = ("logger", "logging", "log", "print", "warnings")  # calls that only speak
Function = ast.FunctionDef | ast.AsyncFunctionDef


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields the operator's name and the new text for a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "comparison", ast.unparse(ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant", str(node.value + 1)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "junction", f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        yield "sign", f"({ast.unparse(ast.BinOp(node.left, SIGNS[type(node.op)](), node.right))})"
    elif isinstance(node, ast.Call) and _two_arguments(node.args) and ast.unparse(node.func) not in SYMMETRIC:
        swapped = [node.args[1], node.args[0], *node.args[2:]]
        yield "arguments", ast.unparse(ast.Call(node.func, swapped, node.keywords))
    elif (
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await) and not _speaks(node.value))
        or isinstance(node, ast.AugAssign)
        or (isinstance(node, ast.Assign) and not any(isinstance(target, ast.Name) for target in node.targets))
    ):
        yield "statement", "pass"


def _two_arguments(arguments: list[ast.expr]) -> bool:
    """True if the first two arguments can be swapped, and differ."""
    if len(arguments) < 2 or any(isinstance(argument, ast.Starred) for argument in arguments):
        return False
    return ast.dump(arguments[0]) != ast.dump(arguments[1])


def _speaks(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[0] in QUIET


def candidates(text: str) -> Iterator[tuple[str, ast.AST, str, int]]:
    """Yields operator, node, new text and the first line of the innermost function, of nodes inside functions."""

    def visit(node: ast.AST, function: int) -> Iterator[tuple[str, ast.AST, str, int]]:
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.arguments):
            return
        if isinstance(node, Function | ast.Lambda):
            decorators = getattr(node, "decorator_list", [])
            line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            for child in node.body if isinstance(node.body, list) else [node.body]:
                yield from visit(child, line)
            return
        if function:
            for operator, new in changes(node):
                yield operator, node, new, function
            if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
                yield "condition", node.test, f"(not ({ast.unparse(node.test)}))", function
        if isinstance(node, ast.Raise):
            return  # what a message says is no behaviour
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr) and _is_annotation(node, child):
                continue
            yield from visit(child, function)

    yield from visit(ast.parse(text), 0)


def _is_annotation(node: ast.AST, child: ast.expr) -> bool:
    return child is getattr(node, "annotation", None) or child is getattr(node, "returns", None)


def replaced(text: str, node: Any, new: str) -> str:
    """Returns the text with the node's source replaced."""
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return (text.encode()[:start] + new.encode() + text.encode()[end:]).decode()


def sample(
    tree: Path, reach: dict[str, Any], size: int, seed: int, areas: Sequence[str], budget_s: float
) -> list[Mutant]:
    """Draws mutants of functions that a test of one process calls, as many from each folder.

    `size` are of all folders; `areas` names those to draw from, and the others' share is left out.
    """
    tests_of = _tests_of(reach, budget_s)
    chosen: list[Mutant] = []
    for number, folder in enumerate(FOLDERS):
        if Path(folder).name not in areas:
            continue
        pool = [
            (path, *candidate)
            for path in sorted((tree / folder).rglob("*.py"))
            for candidate in candidates(path.read_text())
            if (str(path.relative_to(tree)), candidate[3]) in reach_of(reach)
        ]
        random.Random(f"{seed} {folder}").shuffle(pool)
        wanted = size * (number + 1) // len(FOLDERS) - size * number // len(FOLDERS)
        for path, operator, node, new, function in pool[:wanted]:
            chosen.append(_mutant(path, str(path.relative_to(tree)), operator, node, new, function, tests_of))
    return chosen


def reach_of(reach: dict[str, Any]) -> set[tuple[str, int]]:
    """Returns the functions that any test calls, by file and first line."""
    if "called" not in reach:
        reach["called"] = {(file, line) for called in reach["calls"].values() for file, line in called}
    called: set[tuple[str, int]] = reach["called"]
    return called


def _mutant(
    path: Path,
    file: str,
    operator: str,
    node: Any,
    new: str,
    function: int,
    tests_of: Callable[[str, int], tuple[str, ...]],
) -> Mutant:
    text = path.read_text()
    old = ast.get_source_segment(text, node) or ""
    name = f"{file}:{node.lineno}: {operator}: {' '.join(old.split())[:60]} -> {' '.join(new.split())[:60]}"
    slower = next((tests for start, tests in SLOWER.items() if file.startswith(start)), ())
    return Mutant(name, file, text, replaced(text, node, new), tests_of(file, function), slower=slower)


def _tests_of(reach: dict[str, Any], budget_s: float) -> Callable[[str, int], tuple[str, ...]]:
    """Chooses the tests that call a function: the quickest first, up to `budget_s` seconds in sum, and at least one."""
    passed = set(reach["passed"])
    in_file: dict[str, list[str]] = {}
    for test in passed:
        in_file.setdefault(test.split("::")[0], []).append(test)
    callers: dict[tuple[str, int], set[str]] = {}
    for owner, called in reach["calls"].items():
        for file, line in called:
            callers.setdefault((file, line), set()).update([owner] if owner in passed else in_file.get(owner, []))

    def tests_of(file: str, function: int) -> tuple[str, ...]:
        tests = sorted(callers.get((file, function), ()), key=lambda test: (reach["seconds"][test], test))
        chosen, seconds = [], 0.0
        for test in tests:
            seconds += reach["seconds"][test]
            if chosen and seconds > budget_s:
                break
            chosen.append(test)
        return tuple(chosen)

    return tests_of
