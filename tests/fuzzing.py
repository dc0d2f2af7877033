"""Sizes of property-based tests: bounded in `make test`, long in `make test-long`."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

LONG_LIMIT_S = 7200  # for hangs alone


def repeat_examples() -> None:
    """Loads Hypothesis' profile for machines that are slow at times: no deadline, and the same examples every time.

    Hypothesis takes some of its numbers from the source of modules that are imported by then, which earlier tests of
    the process decide. It takes none here.
    """
    settings.load_profile("ci")
    assert hasattr(providers, "_get_local_constants"), "Hypothesis takes the constants of modules elsewhere now"
    providers._get_local_constants = Constants


def fuzzed(bounded: int, long: int) -> pytest.MarkDecorator:
    """Gives a test the argument `effort`, a decorator for its property: `bounded` examples, or `long` of them.

    The bounded ones are the same every time. The long ones are random; a failure prints how to repeat it.
    """
    repeated, random = settings(max_examples=bounded), settings(max_examples=long, derandomize=False)
    marks = (pytest.mark.long, pytest.mark.timeout(LONG_LIMIT_S))
    return pytest.mark.parametrize(
        "effort", [pytest.param(repeated, id="bounded"), pytest.param(random, id="long", marks=marks)]
    )
