"""Other trainers' keys of low-rank adapters, which all follow PEFT's, as knobs of `actor.lora`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.foreign.reading import Reading

BASES = {"load_in_4bit": "nf4", "load_in_8bit": "blockwise8"}


def set_adapters(reading: Reading, keys: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
    """Sets the knobs of `actor.lora`. The other trainer's `keys` and `defaults` are by knob: rank, alpha and others."""
    for knob, key in keys.items():
        value, default = reading.take(key), defaults.get(knob)
        if value is None and default is None:
            continue
        becomes = default if value is None else value
        if knob == "targets" and isinstance(becomes, str):
            becomes = [becomes]
        if knob == "rank" and (not isinstance(becomes, int) or isinstance(becomes, bool) or becomes < 1):
            reading.refuse(key, value, "must be a whole number of at least 1: the rank of the adapters")
        elif knob == "targets" and not becomes:
            reading.refuse(key, value, "names no layer; give names such as q_proj, or all-linear")
        else:
            reading.set(key, value, f"actor.lora.{knob}", becomes, "" if value is not None else "its default")


def set_quantised_base(reading: Reading) -> None:
    """Sets what the base is stored in, from `load_in_4bit` and `load_in_8bit`."""
    given = {key: key in reading.unread for key in BASES}
    wanted = [key for key in BASES if reading.flag(key)]
    if len(wanted) > 1:
        return reading.refuse("load_in_4bit", True, "and load_in_8bit: true exclude each other; leave one out")
    for key, quantization in BASES.items():
        if key in wanted:
            reading.set(key, True, "actor.lora.quantization", quantization, "scales stay float32")
        elif given[key]:
            reading.note(key, False, "no change: it is off")


def leave_adapters(reading: Reading, keys: Mapping[str, str], switch: str) -> None:
    """Notes the keys of adapters that are off, by the key `switch`."""
    for key in keys.values():
        if (value := reading.take(key)) is not None:
            reading.note(key, value, f"no change: {switch} is off")
