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
            (
                "grouped experts get the first one's adapter",
                "adapter(part) for adapter, part in",
                "next(self.children())(part) for _, part in",
            ),
            ("ranks drop alike of their own inputs", "groups.tp_rank if own_input else 0", "0"),
            ("ranks drop their own of a common input", "groups.tp_rank if own_input else 0", "groups.tp_rank"),
        ],
    },
    "megarl/actor/weights/quantised.py": {
        unit("actor/test_quantised_base"): [
            ("rows are stored from the first one on", "self.codes[rows] = codes", "self.codes[: len(codes)] = codes"),
            (
                "scales are stored from the first row on",
                "self.scales[rows] = scales",
                "self.scales[: len(scales)] = scales",
            ),
            ("a cut through a block is let pass", "if (high - low) % BLOCK:", "if False:"),
            (
                "a missing library is found out late",
                'find_spec("bitsandbytes") is None',
                'find_spec("bitsandbytes") == 0',
            ),
        ],
        ("tests/distributed/test_lora_layouts.py",): [
            ("codes lose Megatron's marks of cuts", "self.__dict__.update(weight.__dict__)", "pass"),
        ],
    },
    "megarl/actor/model/quantised_base.py": {
        unit("actor/test_quantised_base"): [
            ("autograd keeps the weight", "if tensor.untyped_storage().data_ptr() != address:", "if True:"),
            ("a layer keeps its weight", "            del module.weight", "            pass"),
        ],
    },
    "megarl/actor/weights/computed_boxes.py": {
        unit("reshard/test_shard_transfer"): [
            ("a part is the whole box", "            values = values[part]", "            pass"),
        ],
    },
    "megarl/reshard/transfer/transports/shm.py": {
        unit("reshard/test_shard_transfer"): [
            ("staging of the killed stays", "        remove_abandoned()\n", "        pass\n"),
            ("staging of the living goes", "flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "fcntl.LOCK_NB"),
        ],
    },
    "megarl/export.py": {
        unit("actor/test_quantised_base"): [
            ("a merged export has the checkpoint's base", 'if adapters.quantization != "none" and', "if False and"),
        ],
        unit("test_export"): [
            (
                "a full disk ends in a traceback",
                "except (OSError, SafetensorError) as error",
                "except OSError as error",
            ),
            (
                "a part of an export stays",
                'errors=True)\n        raise UserError(f"output={output} cannot',
                'errors=True) if False else None\n        raise UserError(f"output={output} cannot',
            ),
        ],
        unit("actor/test_lora"): [
            (
                "merged weights are rounded in silence",
                "weight if is_buffer(name) else rounding.convert(weight, dtype)",
                "weight if is_buffer(name) else weight.to(dtype)",
            ),
        ],
    },
    "megarl/actor/config.py": {
        unit("actor/test_quantised_base"): [
            (
                "servers keep the checkpoint's base for the first step",
                'return not self.path and self.quantization == "none"',
                "return not self.path",
            ),
        ],
    },
    "megarl/actor/sizes/memory.py": {
        unit("actor/test_memory"): [
            ("frozen norms keep as trained ones do", "((2 - self.frozen) * 4 * hidden_size", "(2 * 4 * hidden_size"),
        ],
    },
    "megarl/actor/weights/adapter_shards.py": {
        (*unit("actor/test_lora"), "tests/distributed/test_lora_layouts.py"): [
            ("v_proj has no adapter", 'for letter in "qkv"]', 'for letter in "qk"]'),
        ],
    },
    "megarl/reshard/sync/live_adapters.py": {
        unit("reshard/test_sglang_adapters"): [
            (
                "all adapters have one name in a sync",
                "replace(part.box, name=wire_name(adapter, part.box.name))",
                "part.box",
            ),
            (
                "all adapters are written into the last slot",
                "manager.memory_pool.uid_to_buffer_id[uid]",
                "max(manager.memory_pool.uid_to_buffer_id.values())",
            ),
        ],
    },
    "megarl/reshard/plan/holdings.py": {
        unit("reshard/test_sglang_adapters"): [
            ("all rows are of the first adapter", "repeat(rows) * len(self.names)", "repeat(rows) * 0"),
        ],
    },
    "megarl/reshard/sync/world.py": {
        unit("reshard/test_places"): [
            ("a server may hold more adapters than the trainer sends", "(held - sent, ", "(set[str](), "),
        ],
    },
    "megarl/rollout/servers/served_adapters.py": {
        unit("reshard/test_sglang_adapters"): [
            ("servers have no slot for requests without an adapter", "len(self.names) + 1", "len(self.names)"),
            ("adapters of a server are compared by shape alone", "wanted - held:", "set():"),
        ],
    },
    "megarl/actor/engine.py": {
        ("tests/distributed/test_lora_layouts.py",): [
            ("a resumed run drops by its first steps", "self._weights.steps = self._state.load", "self._state.load"),
        ],
        ("tests/distributed/test_shared_base_layouts.py",): [
            ("the end of one engine on a base ends all", "        if not self._on_base:", "        if True:"),
        ],
    },
    "megarl/actor/model/shared_base.py": {
        unit("actor/test_lora"): [
            ("a second base is allocated", "lambda module, name: True", "lambda module, name: False"),
            ("a base of another checkpoint is taken", "        if ours != theirs:", "        if False:"),
        ],
        ("tests/distributed/test_shared_base_layouts.py",): [
            ("an engine takes a copy of the base", "[attribute] = given", "[attribute] = given.clone()"),
        ],
    },
    "megarl/actor/engine_weights.py": {
        ("tests/distributed/test_shared_base_layouts.py",): [
            ("a critic on a base has a head of zeros", "only = (SCORE,) if on_base", "only = () if on_base"),
        ],
    },
    "megarl/preflight/sizing.py": {
        unit("preflight/test_preflight_report"): [
            (
                "the critic counts the base again",
                "if actor.lora.rank else stage.weights",
                "+ stage.weights",
            ),
        ],
    },
}
