"""Bugs written by hand in relays, buckets by transport and Mooncake's engine."""

from __future__ import annotations

from mutant import Bugs, unit

SYNCS = ("tests/distributed/test_relayed_syncs.py",)

RELAYS: Bugs = {
    "megarl/reshard/plan/relay.py": {
        unit("reshard/test_relay"): [
            (
                "a number of servers spares the trainer's machine",
                "return ServedShares(share, share)",
                "return ServedShares(1.0, share)",
            ),
            (
                "a rank has a colour twice",
                "if not any(colour in of_rank for of_rank in taken)",
                "if colour not in taken[0]",
            ),
        ],
    },
    "megarl/reshard/transfer/digests.py": {
        unit("reshard/test_relay"): [
            ("a relay is blamed for what it was given", "elif int(own_copy[0]) not in wrong:", "else:"),
            (
                "a relay is blamed for what the trainer sent",
                "        return set()\n    at_fault",
                "        pass\n    at_fault",
            ),
        ],
    },
    "megarl/reshard/transfer/store.py": {
        unit("reshard/test_store"): [
            ("a wait outlives its attempt", "if self._store.check([self._ended]):", "if False:"),
        ],
    },
    "megarl/reshard/transfer/shard_transfer.py": {
        SYNCS: [
            (
                "a bucket is sent on before it has come",
                "while any(self.buckets[number] == bucket for _, number, _ in in_flight):",
                "while False:",
            ),
            (
                "a delta is sent on as weights",
                "            if bucket_counts is None:\n                views.pack(slot)",
                "            if True:\n                views.pack(slot)",
            ),
            ("the last messages are not sent on", "forward_before(math.inf)", "forward_before(0)"),
        ],
    },
    "megarl/reshard/sync/coordinator.py": {
        unit("reshard/test_coordinator"): [
            (
                "a server that only waited is left out",
                "[link for link in named if link not in waits] or named",
                "named",
            ),
            ("servers' reports name nobody", "blames = [*rank_errors, *waits.values()]", "blames = rank_errors"),
        ],
    },
    "megarl/reshard/sync/shard_path.py": {
        SYNCS: [
            ("servers behind a bad relay are left out, and it stays", "if not relays:", "if True:"),
        ],
    },
    "megarl/reshard/transfer/memory.py": {
        unit("reshard/test_sync_memory"): [
            ("a relay's own staging is not counted", "bucket_bytes * (1 + forwards)", "bucket_bytes"),
            (
                "digests are counted on GPUs alone",
                "if on_gpu else 0\n    return SyncMemory",
                "if has_gpu else 0\n    return SyncMemory",
            ),
        ],
        unit("preflight/test_planned_sync"): [
            ("staging of a GPU is counted on the host", "return self.held if self.on_gpu else 0", "return 0"),
        ],
    },
    "megarl/preflight/planned_sync.py": {
        unit("preflight/test_planned_sync"): [
            ("relays of the trainer's own nodes are counted", "is_near) < ranks for", "False) < ranks for"),
            ("a stage has the copies of the last rank", "max(kept[place.pp], nbytes)", "nbytes"),
        ],
    },
    "megarl/reshard/transfer/transports/mooncake.py": {
        unit("reshard/test_mooncake"): [
            ("a read that failed passes", "        if outcome:", "        if False:"),
            ("memory stays registered", "self.engine.unregister_memory(slot.data_ptr())", "pass"),
        ],
    },
    "megarl/reshard/sync/places.py": {
        ("tests/nccl_semantics/test_relays_under_nccl.py",): [
            ("servers on one GPU send weights on by nccl", "    if shared is None:", "    if True:"),
        ],
        unit("reshard/test_places"): [
            ("servers on one GPU have no relays by gloo", 'if name == "nccl" for rank', "for rank"),
        ],
    },
    "megarl/reshard/session.py": {
        unit("reshard/test_places"): [
            ("groups stay with buckets of another size", "strict=True)) or grown:", "strict=True)):"),
        ],
        SYNCS: [
            ("relays are used again after they failed", "self._direct = True", "self._direct = False"),
        ],
    },
    "megarl/reshard/sync/server_rank.py": {
        SYNCS: [
            (
                "ranks behind a relay that hangs wait as long as the trainer",
                "seconds = min(spec.relayed_s, seconds)",
                "seconds = seconds + 60.0",
            ),
        ],
    },
}
