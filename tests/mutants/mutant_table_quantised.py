"""Bugs written by hand in quantised rollouts."""

from __future__ import annotations

from mutant import Bugs, unit

QUANTISED: Bugs = {
    "megarl/reshard/plan/quantised.py": {
        unit("reshard/test_quantised_plan"): [
            (
                "scales of stacked weights lie on each other",
                "*(x // block for x, block in at)), box)",
                "0, 0), box)",
            ),
            ("scales of experts lie on each other", "ParameterPart((*part.at[:lead], ", "ParameterPart((*[0] * lead, "),
            (
                "a part may end inside a block",
                "if start % block or (stop % block and not may_end_inside):",
                "if start % block:",
            ),
            ("any rows may end inside a block", "may_end_inside = dim == 0 and ", "may_end_inside = dim == 0 or "),
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
