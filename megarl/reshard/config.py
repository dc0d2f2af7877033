"""The knobs of weight syncs."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.knobs import UserError, knob

CHOICES = {
    "path": ("exact", "full"),
    "transport": ("gloo", "shm", "nccl", "cuda_ipc", "disk"),
    "pause_mode": ("retract", "in_place", "abort"),
    "verify": ("always", "sampled", "off"),
    "on_failure": ("stop", "drop_server"),
}


@dataclass(frozen=True)
class ReshardConfig:
    """Transport, pausing, verification and deadlines of weight syncs."""

    path: str = knob("exact", "exact (each server rank gets just its shards, planned) or full (gather and broadcast)")
    transport: str = knob("gloo", "gloo, shm (same machine), nccl, cuda_ipc (same GPU) or disk (full tensors as files)")
    folder: str = knob("", "folder for transport=disk, which the servers must see too; emptied after each sync")
    bucket_bytes: int = knob(
        64 * 2**20, "bytes of a staging buffer; each rank has two, which bounds its memory in flight"
    )
    pause_mode: str = knob("retract", "retract (exact: recomputes caches), in_place (keeps stale caches) or abort")
    verify: str = knob(
        "always", "always: servers' weights are read back and compared; sampled: an eighth of them per sync; or off"
    )
    delta: bool = knob(
        False, "send only elements that changed since the last sync; keeps a copy of the sent weights in memory"
    )
    anchor_every: int = knob(20, "with delta: send everything once in this many syncs")
    on_failure: str = knob(
        "stop", "if a live server fails a sync or its canary: stop, or drop_server: go on with the others"
    )
    canary_prompts: int = knob(
        4, "prompts that each server completes after a sync, to compare log-probs with the trainer's; 0 = no canary"
    )
    canary_tokens: int = knob(8, "most tokens of each of these completions")
    max_logprob_diff: float = knob(
        0.1,
        "largest mean |trainer - rollout log-prob| of a server's canary, and of the first tokens sampled after a sync, "
        "in nats; 0 = no bound",
    )
    max_token_logprob_diff: float = knob(
        1.0, "largest |trainer - rollout log-prob| of a token of a server's canary, in nats; 0 = no bound"
    )
    host: str = knob("", "the trainer's IPv4 address for weights; empty: 127.0.0.1, on a cluster MEGARL_INTERFACE's")
    connect_deadline_s: float = knob(60.0, "seconds for a server to join the trainer's group, once per server")
    control_deadline_s: float = knob(30.0, "seconds for each of pause, begin, end, version and continue")
    transfer_deadline_s: float = knob(300.0, "seconds for all weights to be sent, applied and read back")

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"reshard.{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        for name in ("bucket_bytes", "anchor_every", "canary_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"reshard.{name}={getattr(self, name)} must be at least 1")
        for name in ("connect_deadline_s", "control_deadline_s", "transfer_deadline_s"):
            if getattr(self, name) <= 0:
                raise UserError(f"reshard.{name}={getattr(self, name)} must be above 0")
        for name in ("canary_prompts", "max_logprob_diff", "max_token_logprob_diff"):
            if not getattr(self, name) >= 0:
                raise UserError(f"reshard.{name}={getattr(self, name)} must not be negative")
        if self.bucket_bytes % 16:
            raise UserError(f"reshard.bucket_bytes={self.bucket_bytes} must be a multiple of 16")
        if self.path == "full" and self.transport not in ("gloo", "disk"):
            raise UserError(f"reshard.transport={self.transport} moves shards; with reshard.path=full use gloo or disk")
        if self.delta and (self.path == "full" or self.transport == "disk"):
            raise UserError("reshard.delta=true needs reshard.path=exact and a transport other than disk")
        if self.transport == "disk" and not self.folder:
            raise UserError("reshard.transport=disk needs reshard.folder, a folder that the servers see too")
