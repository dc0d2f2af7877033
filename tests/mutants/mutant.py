"""A bug to plant: a change of one file, with the tests that should notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of one file. `tests` are test files or ids; `build` compiles `_C` before they run.

    `slower` are tests that run only if `tests` pass.
    """

    name: str
    file: str
    original: str
    mutated: str
    tests: tuple[str, ...]
    build: bool = False
    slower: tuple[str, ...] = ()

    def applied_to(self, text: str) -> str:
        """Returns the file's text with the change.

        Raises:
            ValueError: the original does not stand once in the text.
        """
        if text.count(self.original) != 1:
            raise ValueError(f"{self.name}: {self.file} has its original {text.count(self.original)} times; adapt it")
        return text.replace(self.original, self.mutated)


# file -> the tests that should notice its mutants -> name, original, mutated
Bugs = dict[str, dict[tuple[str, ...], list[tuple[str, str, str]]]]


def unit(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/{name}.py" for name in names)


def flat(bugs: Bugs) -> list[Mutant]:
    """Lists the mutants of a table."""
    return [
        Mutant(f"{file}: {name}", file, original, mutated, tests, file.endswith(".h") and "tests/kernels" in tests[0])
        for file, by_tests in bugs.items()
        for tests, entries in by_tests.items()
        for name, original, mutated in entries
    ]
