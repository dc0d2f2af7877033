"""Bugs written by hand in adapters."""

from __future__ import annotations

from mutant import Bugs, unit

ADAPTERS: Bugs = {
    "megarl/actor/model/adapters.py": {
        unit("actor/test_lora"): [
            ("an adapter is added without its scale", "return output * self.scale", "return output"),
            ("the base keeps its adapters", "        adapter.enabled = False", "        adapter.enabled = True"),
            ("every step drops the same inputs", 'f"{seed}:{step}:', 'f"{seed}:0:'),
            ("what is kept is not scaled up", "x * kept / (1 - self.dropout)", "x * kept"),
        ],
        ("tests/distributed/test_lora_layouts.py",): [
            ("recomputed layers give adapters no gradient", "        output.requires_grad_()", "        pass"),
            ("a rank's own tokens alone have gradients", '"sequence_parallel", True)', '"sequence_parallel", False)'),
            ("ranks drop alike of their own inputs", "groups.tp_rank if own_input else 0", "0"),
            ("ranks drop their own of a common input", "groups.tp_rank if own_input else 0", "groups.tp_rank"),
        ],
    },
    "megarl/actor/memory.py": {
        unit("actor/test_memory"): [
            ("frozen norms keep as trained ones do", "((2 - self.frozen) * 4 * hidden_size", "(2 * 4 * hidden_size"),
        ],
    },
    "megarl/actor/weights/adapter_shards.py": {
        ("tests/distributed/test_lora_layouts.py",): [
            ("v_proj has no adapter", 'for letter in "qkv"]', 'for letter in "qk"]'),
        ],
    },
    "megarl/actor/engine.py": {
        ("tests/distributed/test_lora_layouts.py",): [
            ("a resumed run drops by its first steps", "self._weights.steps = self._state.load", "self._state.load"),
        ],
    },
}
