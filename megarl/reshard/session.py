"""A sync of the servers with the trainer's weights: pause, begin, transfer, end, verify, flush, version, continue.

All trainer ranks call `push` together, because the weights they hand in are gathered collectively; rank 0 alone
talks to the servers, and how it went is told to all. A failure leaves the servers paused: none of them serves a mix of
versions. The next push, which sends everything, mends them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl.knobs import UserError, knob
from megarl.reshard.layout import Box
from megarl.reshard.link import ServerLink
from megarl.reshard.reference import FullSender
from megarl.reshard.sglang import ServerControlError
from megarl.reshard.transports.gloo import Deadline, open_store
from megarl.reshard.verify import check_digests, check_names

PAUSE_MODES = ("retract", "in_place", "abort")
VERIFY_MODES = ("always", "off")


@dataclass(frozen=True)
class ReshardConfig:
    """How weights reach the servers."""

    bucket_bytes: int = knob(64 * 2**20, "most bytes of weights in flight to a server; a larger tensor travels alone")
    pause_mode: str = knob("retract", "retract (exact: recomputes caches), in_place (keeps stale caches) or abort")
    verify: str = knob("always", "always: what each server holds is read back and compared on every sync; or off")
    host: str = knob("127.0.0.1", "IPv4 address of the trainer that the servers connect to for weights")
    connect_deadline_s: float = knob(60.0, "seconds for a server to join the trainer's group, once per server")
    control_deadline_s: float = knob(30.0, "seconds for each of pause, begin, end, flush, version and continue")
    transfer_deadline_s: float = knob(300.0, "seconds for all weights to be sent, applied and read back")

    def __post_init__(self) -> None:
        if self.pause_mode not in PAUSE_MODES:
            raise UserError(f"pause_mode={self.pause_mode!r} is not one of {', '.join(PAUSE_MODES)}")
        if self.verify not in VERIFY_MODES:
            raise UserError(f"verify={self.verify!r} is not one of {', '.join(VERIFY_MODES)}")
        if self.bucket_bytes < 1:
            raise UserError(f"bucket_bytes={self.bucket_bytes} must be at least 1")
        for name in ("connect_deadline_s", "control_deadline_s", "transfer_deadline_s"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name}={getattr(self, name)} must be above 0")


class WeightSyncError(RuntimeError):
    """A sync failed. The servers stay paused until a whole push succeeds, or until they are restarted."""

    def __init__(self, message: str, *, server: str = "", phase: str = "", tensor: str = ""):
        super().__init__(message)
        self.server = server
        self.phase = phase
        self.tensor = tensor


@dataclass(frozen=True)
class SyncReport:
    """What a push did. Only rank 0 has more than the version."""

    version: int
    bytes: int = 0  # sent, over all servers
    tensors: int = 0  # sent
    verified: int = 0  # pieces of tensors proven equal, over all ranks of all servers
    seconds: dict[str, float] = field(default_factory=dict)  # per phase, in order

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


class WeightSession:
    """Keeps the servers at `addresses` (`host:port`) at the trainer's weights, version by version.

    `group` is the process group of the trainer ranks that call `push` (None: the default group, or a single process).
    """

    def __init__(
        self,
        config: ReshardConfig,
        addresses: Sequence[str],
        api_key: str,
        *,
        tp_size: int = 1,
        group: ProcessGroup | None = None,
    ):
        self.config = config
        self.group = group
        self._id = secrets.randbits(62)
        self.version = 0
        self.sequence = 0
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if distributed else 0
        self.world_size = dist.get_world_size(group) if distributed else 1
        self.links = [ServerLink(i, address, api_key) for i, address in enumerate(addresses)] if self.rank == 0 else []
        for link in self.links:
            link.tp_size = tp_size
        self._store = open_store(config.host, config.connect_deadline_s) if self.rank == 0 else None
        self._phase = ("", 0.0)

    def push(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> SyncReport:
        """Brings every server to `named_weights`, served as `version`. Collective over the trainer ranks.

        `named_weights` yields the whole checkpoint, (HF name, whole tensor) each. All ranks iterate it to its end,
        as it may gather; only rank 0's tensors are read. Raises WeightSyncError on every rank when a server fails.
        """
        if version <= self.version:
            raise ValueError(f"version {version} must be above {self.version}: versions only grow")
        self.sequence += 1
        seconds: dict[str, float] = {}
        error = self._on_rank_0(lambda: self._prepare(version, seconds))
        self._agree(error)
        sender: list[FullSender] = []
        error = self._on_rank_0(lambda: self._transfer(named_weights, seconds, sender))
        for _ in named_weights:  # the other ranks, and rank 0 after a failure
            pass
        verified: list[int] = []
        if error is None:
            error = self._on_rank_0(lambda: self._commit(sender[0], version, seconds, verified))
        self._agree(error)
        self.version = version
        if self.rank != 0:
            return SyncReport(version)
        return SyncReport(version, sender[0].bytes, len(sender[0].names), sum(verified), seconds)

    def close(self) -> None:
        """Leaves the groups. The servers go on serving what they have."""
        for link in self.links:
            if link.joined:
                link.abandon()
        self._store = None

    # --- rank 0 ---

    def _prepare(self, version: int, seconds: dict[str, float]) -> None:
        if self.sequence == 1:
            with self._timed("check", seconds):
                for link, info in self._call_all("/model_info", None):
                    served = str(info.get("weight_version"))
                    if served.isdigit() and int(served) >= version:
                        raise self._failure(link, ValueError(f"it serves version {served} already: versions only grow"))
        with self._timed("pause", seconds):
            self._call_all("/pause_generation", {"mode": self.config.pause_mode})
        with self._timed("begin", seconds):
            self._begin()
        with self._timed("connect", seconds, self.config.connect_deadline_s):
            assert self._store is not None, "the session was closed"
            deadline = Deadline(self.config.connect_deadline_s)
            for link in self.links:
                with self._blame(link):
                    link.open(
                        self._store,
                        self.config.host,
                        self._id,
                        self.sequence,
                        self.config.transfer_deadline_s,
                        self.config.verify != "off",
                    )
            for link in self.links:
                if not link.joined:
                    with self._blame(link):
                        link.join(self.config.host, deadline)

    def _transfer(
        self, named_weights: Iterator[tuple[str, Tensor]], seconds: dict[str, float], out: list[FullSender]
    ) -> None:
        with self._timed("transfer", seconds, self.config.transfer_deadline_s):
            boxes: dict[str, set[Box]] = {}
            dtypes: dict[str, torch.dtype] = {}
            for link in self.links:
                for box, dtype in (item for rank in link.held for item in rank.items()):
                    boxes.setdefault(box.name, set()).add(box)
                    if dtypes.setdefault(box.name, dtype) != dtype:
                        raise self._failure(
                            link, ValueError(f"it holds {box.name} as {dtype}, another as {dtypes[box.name]}")
                        )
            sender = FullSender(
                receivers=self.links,
                bucket_bytes=self.config.bucket_bytes,
                deadline=Deadline(self.config.transfer_deadline_s),
                dtypes=dtypes,
                boxes=boxes if self.config.verify != "off" else {},
            )
            out.append(sender)
            for name, tensor in named_weights:
                sender.add(name, tensor)
            check_names(sender.names, boxes)
            sender.finish()

    def _commit(self, sender: FullSender, version: int, seconds: dict[str, float], verified: list[int]) -> None:
        held: list[tuple[ServerLink, int, dict[Box, str]]] = []
        with self._timed("apply", seconds, self.config.transfer_deadline_s):
            for link in self.links:
                with self._blame(link):
                    held += [(link, rank, digests) for rank, digests in enumerate(link.finish(sender.deadline))]
        with self._timed("end", seconds):
            self._call_all("/end_weight_update", {})
        with self._timed("verify", seconds):
            for link, rank, digests in held:
                if self.config.verify != "off":
                    with self._blame(link):
                        check_names({box.name for box in digests}, {box.name for box in link.held[rank]})
                        verified.append(check_digests(sender.digests, digests, f"rank {rank}"))
        if self.config.pause_mode != "in_place":  # there running requests keep their caches, and a flush is refused
            with self._timed("flush", seconds):
                self._call_all("/flush_cache", {})
        with self._timed("version", seconds):
            self._call_all("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        with self._timed("continue", seconds):
            self._call_all("/continue_generation", {})

    def _call_all(self, path: str, body: dict[str, Any] | None) -> list[tuple[ServerLink, dict[str, Any]]]:
        """One request to every server at once. Returns their answers."""
        deadline = Deadline(self.config.control_deadline_s)
        calls, answers = [], []
        for link in self.links:
            with self._blame(link):
                calls.append((link, link.control.send(path, body, deadline)))
        for link, call in calls:
            with self._blame(link):
                answers.append((link, call.result(deadline)))
        return answers

    def _begin(self) -> None:
        """Opens an update session on every server, in place of one that a failed push may have left open."""
        deadline = Deadline(self.config.control_deadline_s)
        calls = []
        for link in self.links:
            with self._blame(link):
                calls.append((link, link.control.send("/begin_weight_update", {}, deadline)))
        for link, call in calls:
            with self._blame(link):
                try:
                    call.result(deadline)
                except ServerControlError as error:
                    if "already open" not in str(error):
                        raise
                    link.control.call("/end_weight_update", {}, deadline)
                    link.control.call("/begin_weight_update", {}, deadline)

    # --- failures ---

    @contextmanager
    def _timed(self, phase: str, seconds: dict[str, float], deadline_s: float | None = None) -> Iterator[None]:
        self._phase = (phase, deadline_s or self.config.control_deadline_s)
        start = time.perf_counter()
        yield
        seconds[phase] = time.perf_counter() - start

    @contextmanager
    def _blame(self, link: ServerLink) -> Iterator[None]:
        """Names the server in whatever fails inside."""
        try:
            yield
        except WeightSyncError:
            raise
        except (RuntimeError, OSError, ValueError) as error:
            raise self._failure(link, error) from error

    def _failure(self, link: ServerLink | None, error: Exception) -> WeightSyncError:
        if isinstance(error, WeightSyncError):
            return error
        phase, deadline_s = self._phase
        where = link.address if link else getattr(error, "server", ", ".join(link.address for link in self.links))
        tensor = getattr(error, "tensor", "")
        return WeightSyncError(
            f"weight sync failed at {where} in phase {phase} (deadline {deadline_s:g} s): {error}; "
            "the servers stay paused until a push succeeds",
            server=where,
            phase=phase,
            tensor=tensor,
        )

    def _on_rank_0(self, step: Callable[[], None]) -> WeightSyncError | None:
        """Runs a step on rank 0. Returns its failure, with the servers abandoned."""
        if self.rank != 0:
            return None
        try:
            step()
        except (RuntimeError, OSError, ValueError) as error:
            failure = self._failure(None, error)
            failure.__cause__ = error if failure is not error else error.__cause__
            for link in self.links:
                link.abandon()
            return failure
        return None

    def _agree(self, error: WeightSyncError | None) -> None:
        """Tells all ranks how rank 0 fared; raises on each of them if it failed."""
        if self.world_size > 1:
            device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
            source = dist.get_global_rank(self.group, 0) if self.group is not None else 0
            text = str(error).encode() if error is not None else b""
            length = torch.tensor([len(text)], device=device)
            dist.broadcast(length, source, group=self.group)
            if length.item():
                message = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
                if self.rank == 0:
                    message.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
                dist.broadcast(message, source, group=self.group)
                if error is None:
                    error = WeightSyncError(bytes(message.tolist()).decode())
        if error is not None:
            raise error
