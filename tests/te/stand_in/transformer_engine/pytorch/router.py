"""Fused routing, which megarl leaves off; Megatron imports the names."""

from __future__ import annotations

from typing import Any


def _absent(*_: Any, **__: Any) -> None:
    raise NotImplementedError("the stand-in of Transformer Engine has no fused routing")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = _absent
