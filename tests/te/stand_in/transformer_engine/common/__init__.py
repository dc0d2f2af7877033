"""The part of `transformer_engine.common` that Megatron imports."""

from transformer_engine.common import recipe  # noqa: F401
