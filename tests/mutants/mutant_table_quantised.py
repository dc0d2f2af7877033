"""Bugs written by hand in quantised rollouts."""

from __future__ import annotations

from mutant import Bugs, unit

KERNELS = ("tests/kernels/test_quantize.py",)
MARLIN = ("tests/sglang/test_arranged_weights.py",)

QUANTISED: Bugs = {
    "csrc/quantize/int4.h": {
        KERNELS: [
            ("a scale is over 7", "kInt4Steps = 7.5f", "kInt4Steps = 7.0f"),
            ("8 and above become 7 with either sign", "? 0u : 15u;", "? 15u : 15u;"),
            ("NaN has a code of its own", "return kZeroCode;", "return 15u;"),
            ("scales are cut, not rounded", "(bits + 0x7fffu + (bits >> 16 & 1u)) >> 16", "bits >> 16"),
            ("a group of zeros has the scale 0", "return scale ? scale : ", "return scale != 1 ? scale : "),
            ("7 and a half becomes 8", "return code > 15u ? 15u : code;", "return code & 15u;"),
        ],
    },
    "megarl/reshard/sync/marlin_weights.py": {
        MARLIN: [
            ("the lane's halves are swapped", "permute(4, 0, 3, 6, 1, 7, 2, 5)", "permute(4, 0, 3, 6, 1, 7, 5, 2)"),
            (
                "scales of a single group go in squares of 8",
                "square = (8, 8) if groups > 1",
                "square = (8, 8) if groups",
            ),
            ("live scales stay", "        self.arranged_scales.copy_(permuted_scales(self.scales.t()))\n", ""),
            ("live codes stay", "        self.arranged.copy_(to_marlin(self.codes))\n", ""),
            ("the copies keep their memory", "plain.untyped_storage().resize_(0)", "pass"),
            (
                "the copies begin empty",
                "plain.numel() * plain.itemsize)\n        self.read()",
                "plain.numel() * plain.itemsize)",
            ),
            (
                "digests are of the copies",
                "            layer.write()\n            layer.read()",
                "            layer.write()",
            ),
        ],
    },
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
