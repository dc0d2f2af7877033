"""SGLang's options for a server that gets adapters alone, and the empty adapter that it starts with.

The adapter has a slot of its own in SGLang's pool, which is never evicted. A sync writes into the slot in place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.knobs import UserError

if TYPE_CHECKING:  # a server process begins with this file, and `families` imports torch
    from megarl.families.adapters import Adapters

FOLDER = "start_adapter"  # beside the servers' logs
SLOTS = 2  # of the pool: the trained adapter, and requests without one; SGLang pins all but one
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # a safetensors file: the length of its header, and the header
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def arguments(adapters: Adapters, logs: Path) -> dict[str, Any]:
    """Writes the adapter that a server starts with, and returns SGLang's ServerArgs for it.

    It has no tensors, which SGLang takes for zeros. Its scale is the trained one's.
    """
    from megarl.families.adapters import SERVED

    folder = (logs / FOLDER).resolve()
    folder.mkdir(exist_ok=True)
    targets = _targets(adapters)
    document = {
        "peft_type": "LORA",
        "r": adapters.rank,
        "lora_alpha": adapters.scale * adapters.rank,  # SGLang's scale is alpha / rank, with no other kind
        "target_modules": targets,
    }
    (folder / "adapter_config.json").write_text(json.dumps(document))
    (folder / "adapter_model.safetensors").write_bytes(NO_TENSORS)
    pinned = {"lora_name": SERVED, "lora_path": str(folder), "pinned": True}
    return {
        "enable_lora": True,
        "max_lora_rank": adapters.rank,
        "max_loras_per_batch": SLOTS,
        "lora_target_modules": _modules(adapters),
        "lora_paths": [json.dumps(pinned)],
    }


def _targets(adapters: Adapters) -> list[str]:
    """Ends of the names of the layers with adapters, as PEFT has them."""
    from megarl.families.adapters import ALL_LINEAR

    return list(LINEAR if adapters.targets == (ALL_LINEAR,) else adapters.targets)


def _modules(adapters: Adapters) -> list[str]:
    """Last words of those names, as SGLang's option has them."""
    return sorted({target.rpartition(".")[2] for target in _targets(adapters)})


def check_held(facts: Mapping[str, Any], adapters: Adapters | None, address: str) -> None:
    """Compares the adapters of a server that runs already, by its `/server_info`, with the run's.

    Raises:
        UserError: naming the server, its adapters and the run's.
    """
    from megarl.families.adapters import SERVED

    found = any(entry["lora_name"] == SERVED for entry in facts.get("lora_paths") or ())
    held = "no adapter"
    if found:
        held = f"one of rank {facts['max_lora_rank']} on {', '.join(sorted(facts['lora_target_modules']))}"
    wanted = "no adapter"
    if adapters is not None:
        wanted = f"one of rank {adapters.rank} on {', '.join(_modules(adapters))}"
    if held != wanted:
        raise UserError(
            f"the SGLang server at {address} holds {held}, and actor.lora with sync="
            f"{'merged' if adapters is None else 'adapters'} has {wanted} for it; start it by megarl.serve with the "
            "run's knobs"
        )


def check_options(sglang: Mapping[str, Any]) -> None:
    """Refuses SGLang's own options of adapters, where megarl sets them.

    Raises:
        UserError: naming the option.
    """
    for name, value in sglang.items():
        if "lora" in name:
            raise UserError(
                f"sglang.{name}={value!r} cannot be set with actor.lora.sync=adapters, which has the server hold one "
                "adapter, the trained one; leave it out, or set actor.lora.sync=merged"
            )
