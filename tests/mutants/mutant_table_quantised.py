"""Bugs written by hand in quantised rollouts."""

from __future__ import annotations

from mutant import Bugs, unit

QUANTISED: Bugs = {
    "megarl/reshard/plan/quantised.py": {
        unit("reshard/test_quantised_plan"): [
            (
                "scales of stacked weights lie on each other",
                "ParameterPart(tuple(x // block for x, block in at), box)",
                "ParameterPart((0, 0), box)",
            ),
            ("a part may end inside a block", "if start % block or stop % block:", "if start % block:"),
            ("preflight plans with unmerged parts", "boxes = boxes_of(merged(", "boxes = boxes + boxes_of(merged("),
        ],
    },
    "megarl/reshard/quantised_weights.py": {
        unit("reshard/test_quantised_plan"): [
            (
                "parts of a weight are put on each other",
                "shard.stop, box.start, strict",
                "shard.stop, shard.start, strict",
            ),
            ("each sync has new buffers", "if name not in self._buffers:", "if True:"),
            ("ranks have scales of their own part of a row", "if self._tp is None or", "if True or"),
        ],
        unit("actor/test_quantization_aware"): [
            ("a pass leaves rounded weights", "for view, values in kept:", "for view, values in kept[1:]:"),
            ("full weights are computed with", "view.copy_(part)", "pass"),
        ],
    },
}
