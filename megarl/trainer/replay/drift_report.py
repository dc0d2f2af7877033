"""Words, tables and curves of a comparison, for the terminal and for its page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.trainer.replay.drift import Drift
from megarl.types import PackedBatch

Rows = list[list[str]]
Panel = tuple[str, str, str, list[tuple[float, float, float]]]  # title, both axes, (place, typical, largest)


@dataclass(frozen=True)
class Report:
    """Shown parts: lines, tables with a heading and a row of names, and panels to draw."""

    lines: list[str]
    tables: list[tuple[str, Rows]]
    panels: list[Panel]


def report(drift: Drift, batch: PackedBatch, tokenizer: Any, is_server: bool) -> Report:
    """Puts the figures into words. `is_server`: the other side is a server, whose layers cannot be read."""
    by_token = [["token", "sequence", "position", "actor", "other", "difference"]]
    for token in drift.worst:
        text = repr(tokenizer.decode([token.token]))
        by_token.append(
            [
                text,
                str(token.sequence),
                str(token.position),
                f"{token.one:.6f}",
                f"{token.other:.6f}",
                f"{token.gap:+.1e}",
            ]
        )
    by_position = [["positions", "tokens", "mean difference", "largest"]]
    for part in drift.positions:
        by_position.append([f"{part.first}-{part.last}", str(part.tokens), f"{part.mean:.1e}", f"{part.largest:.1e}"])
    tables = [("Tokens that differ most, in nats", by_token), ("By position in the sequence, in nats", by_position)]
    centers = [((part.first + part.last) / 2, part.mean, part.largest) for part in drift.positions]
    panels: list[Panel] = [("Log-probs by position", "position in the sequence", "difference in nats", centers)]
    if drift.layers:
        tables.insert(0, ("By layer: relative error of hidden states", _layers(drift, batch)))
        series = [(float(layer.layer), layer.median, layer.largest) for layer in drift.layers]
        panels.insert(0, ("Hidden states by layer", "layer (0: embedding)", "relative error", series))
    return Report(_lines(drift, is_server), tables, panels)


def _layers(drift: Drift, batch: PackedBatch) -> Rows:
    routed = any(layer.same_experts is not None for layer in drift.layers)
    rows = [["layer", "median", "largest", "at sequence, position", *["same experts"] * routed]]
    for layer in drift.layers:
        sequence = sum(bound <= layer.token for bound in batch.bounds) - 1
        place = f"{sequence}, {layer.token - batch.bounds[sequence]}" if layer.largest else "-"
        same = "-" if layer.same_experts is None else f"{layer.same_experts:.2%}"
        name = "embedding" if layer.layer == 0 else str(layer.layer)
        rows.append([name, f"{layer.median:.1e}", f"{layer.largest:.1e}", place, *[same] * routed])
    return rows


def _lines(drift: Drift, is_server: bool) -> list[str]:
    lines = [
        f"log-probs {drift.tokens} tokens: {drift.mean:.1e} nats apart on average, {drift.largest:.1e} at worst; "
        f"{drift.equal} are equal in every bit"
    ]
    if is_server:
        lines.append("layers    not compared: a server tells log-probs over HTTP, and no hidden states")
    elif drift.parting is None:
        lines.append("layers    equal in every bit")
    else:
        name = "the embedding" if drift.parting.layer == 0 else f"layer {drift.parting.layer}"
        lines.append(f"layers    they part at {name}, by {drift.parting.largest:.1e} at worst")
        if drift.steepest is not None:
            lines.append(f"          layer {drift.steepest.layer} multiplies the typical error the most")
    if changed := [layer for layer in drift.layers if layer.same_experts is not None and layer.same_experts < 1]:
        worst = min(changed, key=lambda layer: layer.same_experts or 0.0)
        lines.append(
            f"experts   {len(changed)} layers choose others; layer {worst.layer} agrees on {worst.same_experts:.2%}"
        )
    return lines
