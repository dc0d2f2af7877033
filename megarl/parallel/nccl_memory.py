"""NCCL's kind of memory in a trainer rank: NCCL_CUMEM_ENABLE, before NCCL starts. Imports no torch.

Trainer and server ranks share communicators. On one machine NCCL hands memory over by the kind of handle that each
process's own setting names, so both sides must have one setting. SGLang sets 0 where the variable is absent, and 1 for
symmetric memory (`_set_envs_and_config` of srt/entrypoints/engine.py); NCCL's own default is 1 with current drivers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

VARIABLE = "NCCL_CUMEM_ENABLE"


def enter(sglang: Mapping[str, Any]) -> None:
    """Sets the variable in this trainer rank as servers with these ServerArgs have it. A user's own value is kept.

    Symmetric memory overrules the user's value, as in SGLang. Servers that the rank starts inherit the variable.
    """
    if sglang.get("enable_symm_mem"):
        os.environ[VARIABLE] = "1"
    else:
        os.environ.setdefault(VARIABLE, "0")
