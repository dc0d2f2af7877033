"""The line of a refused setting, for tests of checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.knobs import UserError


def refusal(call: Callable[[], Any]) -> str:
    """Returns the one line with which `call` is refused."""
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)
