"""One rank of a Megatron trainer that pushes the weights of a new random model for each version.

Runs come over a pipe: the layout, the servers, the versions. RANK and WORLD_SIZE are set as by torchrun. The rank sends
back the result of each push, or its failure, and None after each run.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.reshard.config import ReshardConfig
from megarl.reshard.session import SyncReport, WeightSession
from megarl.reshard.sync import coordinator
from megarl.reshard.sync.coordinator import WeightSyncError
from megarl.reshard.transfer.transports.gloo import GlooTransport
from megarl.rollout.client.sglang_client import RemoteSGLangEngine, RolloutConfig
from megarl.types import WeightUpdateMeta
from tests import warm
from tests.sglang.tiny_models import make_model


def take(engine: MegatronEngine, family: str, seed: int) -> None:
    """Gives this rank its shards of the random model of `seed`."""
    weights = make_model("qwen3", True, seed).state_dict() if family == "qwen3" else {}
    with torch.no_grad():
        for shard in engine.shards():
            if shard.name not in weights:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}{shard.name}".encode()))
                noise = 0.15 * torch.randn(shard.shape, generator=generator)
                weights[shard.name] = noise + (1.0 if "norm" in shard.name else 0.0)
            shard.view.copy_(weights[shard.name][shard.index])


def die_in_the_middle(rank: int) -> None:
    """Kills this rank as it sends its second message."""
    send, tags = GlooTransport.send, []

    def send_once(self: GlooTransport, slot: int, nbytes: int, peer: int, tag: int) -> Any:
        tags.append(tag)
        if len(tags) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(self, slot, nbytes, peer, tag)

    GlooTransport.send = send_once  # type: ignore[method-assign]


def push(engine: MegatronEngine, session: WeightSession, rollout: RemoteSGLangEngine, meta: WeightUpdateMeta) -> Any:
    """Pushes by the public order of calls. Returns rank 0's report."""
    is_rank0 = engine.groups.rank == 0
    future = rollout.update_weights(meta) if is_rank0 else None
    engine.upload_weights(meta)
    report = future.result(timeout=0) if future is not None else SyncReport(session.version)
    rollout.set_version(meta.model_version)
    return report


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


def carry_out(run: dict[str, Any], pipe: Connection) -> None:
    """Carries out one run, with its own engine and session."""
    family = run["family"]
    engine = MegatronEngine(EngineConfig(path=run["checkpoint"]), ParallelConfig(**run["layout"]))
    engine.initialize()
    session = WeightSession(ReshardConfig(**run["reshard"]), run["addresses"], run["api_key"])
    rollout = RemoteSGLangEngine(RolloutConfig())
    rollout.connect(session)
    engine.connect(session)
    for number, version in enumerate(run["versions"]):
        if number and "seen" in run and engine.groups.rank == 0:
            wait_for(Path(run["seen"], str(version - 1)))
        take(engine, family, version)
        if run.get("victim") == engine.groups.rank and version == run["versions"][-1]:
            die_in_the_middle(engine.groups.rank)
        kind = run["types"][number % len(run["types"])]
        path = f"{run['exported']}-{version}" if kind == "disk" else None
        try:
            report = push(engine, session, rollout, WeightUpdateMeta(kind, path, version))
        except WeightSyncError as error:
            failed = {name: getattr(error, name) for name in ("server", "rank", "phase", "tensor")}
            pipe.send({"failed": str(error), **failed})
            os._exit(3)  # like a trainer that stops: its other ranks may be gone
        pipe.send([report.version, report.bytes, report.verified])
    engine.save(Path(run["exported"]))
    session.close()


def main(pipe: Connection, environment: dict[str, str], log: str) -> None:
    warm.become(environment, log)
    coordinator.EXPLAIN_S = 300.0  # a busy server says late that it lives
    while True:
        carry_out(pipe.recv(), pipe)
        groups.leave_layout()
        pipe.send(None)
