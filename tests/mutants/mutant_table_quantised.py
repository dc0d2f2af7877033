"""Bugs written by hand in quantised rollouts."""

from __future__ import annotations

from mutant import Bugs, unit

QUANTISED: Bugs = {
    "megarl/reshard/plan/block_fp8.py": {
        unit("reshard/test_quantised_plan"): [
            ("scales of stacked weights lie on each other", "tuple(corner // BLOCK for corner in part.at)", "(0, 0)"),
            ("a part may end inside a block", "if start % BLOCK or stop % BLOCK:", "if start % BLOCK:"),
            ("preflight plans with unmerged parts", "boxes = [whole, scales", "boxes = [*boxes, scales"),
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
        ],
    },
}
