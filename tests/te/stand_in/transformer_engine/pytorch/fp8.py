"""FP8 is always off."""

from __future__ import annotations

import contextlib
from typing import Any


class FP8GlobalStateManager:
    """State of FP8, as far as Megatron asks for it."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None


def fp8_autocast(enabled: bool = True, **_: Any) -> Any:
    if enabled:
        raise NotImplementedError("the stand-in of Transformer Engine has no FP8")
    return contextlib.nullcontext()


def fp8_model_init(enabled: bool = True, **_: Any) -> Any:
    return fp8_autocast(enabled)
