"""Recipes of FP8 that Megatron builds for megarl, and a base class of its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Format(Enum):
    """8-bit formats of forward and backward."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


class DelayedScaling:
    """Base class of Megatron's recipe; the stand-in does not compute it."""


@dataclass(frozen=True)
class Float8BlockScaling:
    fp8_format: Format = Format.E4M3
    block = 128
    align = 16


@dataclass(frozen=True)
class MXFP8BlockScaling:
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    block = 32
    align = 32
