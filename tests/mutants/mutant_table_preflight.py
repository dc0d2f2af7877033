"""Bugs written by hand in preflight's traffic of a step, its search for layouts, and the simulator of a run."""

from __future__ import annotations

from mutant import Bugs, unit

TRAFFIC, TUNE = unit("preflight/test_communication"), unit("preflight/test_tune")

PREFLIGHT: Bugs = {
    "megarl/preflight/communication.py": {
        TRAFFIC: [
            ("all of a collective is hidden", "return max(0.0, seconds - compute)", "return 0.0"),
            ("no piece stays exposed", " + min(seconds, compute) / pieces", ""),
            ("frozen layers hide collectives", "2 * x if work.frozen else x + 2 *", "x + 2 *"),
            ("the second gather of backward moves nothing", "gathers = 3 if", "gathers = 2 if"),
            (
                "userbuffers in Megatron's own layers",
                "elif parallel.tp_comm_overlap and work.te:",
                "elif parallel.tp_comm_overlap:",
            ),
            ("rings of layers that gather", "    if work.te:\n        ranks", "    if True:\n        ranks"),
            ("a ring step hides beside all of attention", "/ work.flops / cp\n", "/ work.flops\n"),
            ("causal attention needs all keys", "* 0.75 * others", "* others"),
            ("flex sends a copy for each expert", 'if work.dispatcher == "flex":', "if False:"),
            ("an exchange never leaves the node", "min(1.0, max(1, work.cluster.gpus_per_node) / (ep * etp))", "1.0"),
            ("shared experts hide exchanges always", "if work.shared_beside and share.overlap and not", "if not"),
            ("shared experts run beside userbuffers", " and not share.parallel.tp_comm_overlap:", ":"),
            ("virtual stages hide the filling too", "filling = min(1.0, ", "filling = 0 * min(1.0, "),
            ("exchanges of one stage are hidden", "if vpp > 1 and passes.backward:", "if passes.backward:"),
            ("all gradients hide", "reduced = max(seconds(tail * GRADIENT, groups), ", "reduced = max(0.0, "),
            ("stages gather at once", "gathered += (parallel.pp_size - 1) * gather_s", "pass"),
            ("the last gather is hidden", "alone = int(work.sends)", "alone = 0"),
            ("adapters reduce frozen weights", "(held.trained_dense, ", "(held.dense, "),
            (
                "overlap=false hides gradients",
                "    if share.overlap:\n        reduced",
                "    if True:\n        reduced",
            ),
            ("no exchange waits in the bubble", "self.exposed * count * (1 + bubble)", "self.exposed * count"),
            ("recomputation moves nothing", 'self.again == "full" or ', "False or "),
        ],
    },
    "megarl/preflight/trainer_work.py": {
        TRAFFIC: [
            ("selective repeats no MLP", "again=not (te and isinstance(mlp, Mlp))", "again=False"),
            ("shared experts run beside adapters' exchanges", "te and adapters is None and", "te and"),
        ],
    },
    "megarl/preflight/trainer_time.py": {
        TRAFFIC: [
            ("microbatches of virtual stages are any number", "    if parallel.vpp_size > 1:\n", "    if False:\n"),
            ("padding costs nothing", "count / full if parallel.tp_comm_overlap else 1.0", "1.0"),
        ],
    },
    "megarl/preflight/tune.py": {
        TUNE: [
            ("virtual stages that do not divide the layers", "if math.gcd(*counts) % n == 0", "if counts[0] % n == 0"),
            ("no virtual stages", "most = 1 if base.pp_size == 1 else", "most = 1 if True else"),
            ("no userbuffers", "if base.sequence_parallel and is_te(config):", "if False:"),
            (
                "userbuffers that the run refuses",
                "if not failures([partial(userbuffers",
                "if True or not failures([partial(userbuffers",
            ),
        ],
    },
    "megarl/actor/sizes/memory.py": {
        unit("actor/test_userbuffers"): [
            ("userbuffers take no memory", "USERBUFFERS * load.tokens", "0 * load.tokens"),
            (
                "memory of microbatches that are not padded",
                "    if parallel.tp_comm_overlap:  # pads",
                "    if False:  # pads",
            ),
        ],
    },
    "megarl/preflight/planned_sync.py": {
        unit("preflight/test_planned_sync"): [
            ("a plan for each table", "    _last.append(((config, adapters), model, made))\n", ""),
            ("the plan of another configuration", "if of is model and key == (config, adapters):", "if of is model:"),
        ],
    },
    "megarl/ops/digest.py": {
        unit("reshard/test_sync_memory"): [
            ("joined hashes are not counted", "(PLACE + 2 * LEAF_DIGEST)", "(PLACE + LEAF_DIGEST)"),
        ],
    },
    "benchmarks/pipeline_simulator.py": {
        unit("test_pipeline_simulator"): [
            (
                "the update begins while weights are read",
                "self._at(max(self.now, end) + tokens",
                "self._at(end + tokens",
            ),
            ("scoring is paid twice", "(self.setup.train_s - self.setup.score_s)", "self.setup.train_s"),
            (
                "a batch is scored before it is complete",
                "scores_beside and self._complete(self.version + 1)",
                "scores_beside and len(self.finished)",
            ),
            (
                "a scored batch is handed out again",
                "self.handed = 0 if scored is None else self.setup.prompts",
                "self.handed = 0",
            ),
            (
                "all of a sync is exposed",
                "self.updated if scored is None else min(scored[0], self.now)",
                "self.updated",
            ),
        ],
    },
}
