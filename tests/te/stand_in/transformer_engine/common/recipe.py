"""Recipes of FP8, as base classes only."""


class DelayedScaling:
    """Base class of Megatron's recipe; the stand-in has no FP8."""
