"""SGLang's options for a server that gets adapters alone, and the empty adapters that it starts with.

Each adapter has a slot of its own in SGLang's pool, which is never evicted. A sync writes into the slots in place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.knobs import UserError

if TYPE_CHECKING:  # a server process begins with this file, and `families` imports torch
    from megarl.families.adapters import Adapters

FOLDER = "start_adapters"  # beside the servers' logs
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # a safetensors file: the length of its header, and the header
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ServedAdapters:
    """Adapters of one shape that a server holds, by their names on it."""

    shape: Adapters
    names: tuple[str, ...]

    def arguments(self, logs: Path) -> dict[str, Any]:
        """Writes the adapters that a server starts with, and returns SGLang's ServerArgs for them.

        They have no tensors, which SGLang reads as zeros, and the scale of the trained adapters. The scale is part of
        their folder's name, because `/server_info` reports only the path.
        """
        rank, pinned = self.shape.rank, []
        document = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": self.shape.scale * rank,  # SGLang's scale is alpha / rank, with no other kind
            "target_modules": self._targets(),
        }
        for name in self.names:
            folder = (logs / FOLDER / self.scale / name).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "adapter_config.json").write_text(json.dumps(document))
            (folder / "adapter_model.safetensors").write_bytes(NO_TENSORS)
            pinned.append(json.dumps({"lora_name": name, "lora_path": str(folder), "pinned": True}))
        return {
            "enable_lora": True,
            "max_lora_rank": rank,
            "max_loras_per_batch": len(self.names) + 1,  # slots: one for requests without an adapter, never pinned
            "lora_target_modules": self.modules(),
            "lora_paths": pinned,
        }

    @property
    def scale(self) -> str:
        """Folder of the start adapters: their factor, alpha / rank, to 6 digits."""
        return f"scale_{self.shape.scale:.6g}"

    def _targets(self) -> list[str]:
        """Suffixes of the names of layers with adapters, in PEFT's form."""
        from megarl.families.adapters import ALL_LINEAR

        return list(LINEAR if self.shape.targets == (ALL_LINEAR,) else self.shape.targets)

    def modules(self) -> list[str]:
        """Last words of the suffixes, in the form of SGLang's option."""
        return sorted({target.rpartition(".")[2] for target in self._targets()})


def check_held(facts: Mapping[str, Any], adapters: ServedAdapters | None, address: str) -> None:
    """Compares the adapters of a server that runs already, by its `/server_info`, with the run's.

    Raises:
        UserError: naming the server, and the adapters or the shape that differ.
    """
    held = {entry["lora_name"] for entry in facts.get("lora_paths") or ()}
    wanted = set() if adapters is None else set(adapters.names)
    fault = ""
    if others := held - wanted:
        fault = f"holds adapters that are not the run's: {', '.join(sorted(others))}"
    elif missing := wanted - held:
        fault = f"lacks the run's adapters {', '.join(sorted(missing))}"
    elif adapters is not None:
        scales = sorted({Path(entry["lora_path"]).parent.name for entry in facts["lora_paths"]})
        found = _described(facts["max_lora_rank"], scales, facts["lora_target_modules"])
        if found != (own := _described(adapters.shape.rank, [adapters.scale], adapters.modules())):
            fault = f"holds adapters of {found}, and the run's are of {own}"
    if fault:
        raise UserError(f"the SGLang server at {address} {fault}; start it by megarl.serve with the run's knobs")


def _described(rank: int, scales: Sequence[str], modules: Iterable[str]) -> str:
    return f"rank {rank}, {' and '.join(scales).replace('_', ' ')}, on {', '.join(sorted(modules))}"


def check_options(sglang: Mapping[str, Any]) -> None:
    """Refuses SGLang's own options of adapters, where megarl sets them.

    Raises:
        UserError: naming the option.
    """
    for name, value in sglang.items():
        if "lora" in name:
            raise UserError(
                f"sglang.{name}={value!r} cannot be set with actor.lora.sync=adapters, which has the servers hold "
                "the trained adapters alone; leave it out, or set actor.lora.sync=merged"
            )
