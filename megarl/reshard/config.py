"""The knobs of weight syncs."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.knobs import MAX_COUNT, MAX_SECONDS, UserError, check_ranges, knob

PATHS = ("exact", "full")
AUTO = "auto"
TRANSPORTS = (AUTO, "gloo", "shm", "nccl", "cuda_ipc", "nixl", "mooncake", "disk")
PAUSE_MODES = ("retract", "in_place", "abort")
VERIFY = ("always", "sampled", "off")
ON_FAILURE = ("stop", "drop_server")
OFF = "off"
RELAYED_FROM = 16  # number of servers from which on reshard.relay=auto uses relays
RELAYING = (AUTO, "gloo", "nccl", "nixl", "mooncake")  # transports that reach from server to server


@dataclass(frozen=True)
class ReshardConfig:
    """Transport, pausing, verification and deadlines of weight syncs."""

    path: str = knob(
        "exact", "exact (each server rank gets just its shards, planned) or full (gather and broadcast)", choices=PATHS
    )
    transport: str = knob(
        AUTO,
        "auto (cuda_ipc on the trainer's machine, nccl to GPUs of others, gloo without GPUs), gloo, shm (same "
        "machine), nccl, cuda_ipc (same machine's GPUs), nixl or mooncake (RDMA), or disk (full tensors as files)",
        choices=TRANSPORTS,
    )
    folder: str = knob(
        "", "folder for transport=disk, which the servers must see too; emptied after each sync", path=True
    )
    bucket_bytes: int = knob(
        0,
        "bytes of a staging buffer; each rank has two, which bounds its memory in flight; 0: by the transport's speed, "
        "64 MiB, with nccl and nixl 256 MiB",
        least=0,
        most=2**36,
    )
    relay: str = knob(
        AUTO,
        f"auto (from {RELAYED_FROM} servers on, servers send weights on to others as far as the trainer cannot serve "
        "all of them at full speed), off, or the number of servers that the trainer serves itself",
    )
    pause_mode: str = knob(
        "retract",
        "retract (exact: recomputes caches), in_place (running requests go on with stale caches) or abort",
        choices=PAUSE_MODES,
    )
    overlap_scoring: bool = knob(
        False,
        "score the next batch while the servers receive the weights; needs rollout.max_head_offpolicyness above 0",
    )
    verify: str = knob(
        "always",
        "always: servers' weights are read back and compared; sampled: an eighth of them per sync; or off",
        choices=VERIFY,
    )
    delta: bool = knob(
        False, "send only elements that changed since the last sync; keeps a copy of the sent weights in memory"
    )
    anchor_every: int = knob(20, "with delta: send everything once in this many syncs", least=1, most=MAX_COUNT)
    on_failure: str = knob(
        "stop",
        "if a live server fails a sync or its canary: stop, or drop_server: go on with the others",
        choices=ON_FAILURE,
    )
    canary_prompts: int = knob(
        4,
        "prompts that each server completes after a sync, to compare log-probs with the trainer's; 0 = no canary",
        least=0,
        most=10_000,
    )
    canary_tokens: int = knob(8, "most tokens of each of these completions", least=1, most=100_000)
    max_logprob_diff: float = knob(
        0.1,
        "largest mean |trainer - rollout log-prob| of a server's canary, and of the first tokens sampled after a sync, "
        "in nats; 0 = no bound",
        least=0,
        most=1000,
    )
    max_token_logprob_diff: float = knob(
        1.0,
        "largest |trainer - rollout log-prob| of a token of a server's canary, in nats; 0 = no bound",
        least=0,
        most=1000,
    )
    host: str = knob("", "the trainer's IPv4 address for weights; empty: 127.0.0.1, on a cluster MEGARL_INTERFACE's")
    connect_deadline_s: float = knob(
        60.0, "seconds for a server to join the trainer's group, once per server", above=0, most=MAX_SECONDS
    )
    control_deadline_s: float = knob(
        30.0, "seconds for each of pause, begin, end, version and continue", above=0, most=MAX_SECONDS
    )
    transfer_deadline_s: float = knob(
        300.0, "seconds for all weights to be sent, applied and read back", above=0, most=MAX_SECONDS
    )

    def __post_init__(self) -> None:
        check_ranges(self, "reshard")
        if self.bucket_bytes % 16:
            raise UserError(f"reshard.bucket_bytes={self.bucket_bytes} must be a multiple of 16")
        if self.path == "full" and self.transport not in (AUTO, "gloo", "disk"):
            raise UserError(f"reshard.transport={self.transport} moves shards; with reshard.path=full use gloo or disk")
        if self.delta and (self.path == "full" or self.transport == "disk"):
            raise UserError("reshard.delta=true needs reshard.path=exact and a transport other than disk")
        if self.overlap_scoring and (self.path == "full" or self.transport == "disk"):
            raise UserError(
                "reshard.overlap_scoring=true needs reshard.path=exact and a transport other than disk: whole tensors "
                "are gathered by all ranks, which score meanwhile; set it to false"
            )
        counted = self.relay not in (AUTO, OFF)
        if counted and not (self.relay.isascii() and self.relay.isdigit() and 0 < int(self.relay[:10]) <= MAX_COUNT):
            raise UserError(f"reshard.relay={self.relay} must be auto, off, or a number of servers, at least 1")
        if counted and (self.path == "full" or self.transport not in RELAYING):
            raise UserError(
                f"reshard.relay={self.relay} needs reshard.path=exact and one of the transports {', '.join(RELAYING)}: "
                "others do not reach from server to server; use reshard.relay=auto or off"
            )
        if self.transport == "disk" and not self.folder:
            raise UserError("reshard.transport=disk needs reshard.folder, a folder that the servers see too")

    def relay_among(self, servers: int) -> str:
        """The relays that a sync of so many servers is planned with: `auto` needs enough of them."""
        return OFF if self.relay == AUTO and servers < RELAYED_FROM else self.relay
