"""NCCL's kind of memory in trainer and server ranks: NCCL_CUMEM_ENABLE, before NCCL starts. Imports no torch.

Trainer and server ranks share communicators. On one machine NCCL hands memory over by the kind of handle that each
process's own setting names, so both sides must have one setting. SGLang sets 0, or 1 by rules of its own
(`_set_envs_and_config` of its engine.py, and moe_hook.py); NCCL's own default is 1 with current drivers. So megarl
sets the variable on both sides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

VARIABLE = "NCCL_CUMEM_ENABLE"


def setting(sglang: Mapping[str, Any]) -> str:
    """Value for servers with these ServerArgs and their trainer: the user's own, else 0.

    Symmetric memory needs 1, and SGLang overrules the user's value for it. DeepEP's second version needs 1 too.
    """
    if sglang.get("enable_symm_mem"):
        return "1"
    return os.environ.get(VARIABLE, "1" if sglang.get("moe_a2a_backend") == "deepep_v2" else "0")


def enter(sglang: Mapping[str, Any]) -> None:
    """Sets the variable in this trainer rank."""
    os.environ[VARIABLE] = setting(sglang)
