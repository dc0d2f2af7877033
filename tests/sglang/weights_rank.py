"""One rank of a Megatron trainer that pushes: takes the weights of a new random model for each version, and syncs.

    weights_rank.py SETTINGS.json     the layout, the servers, the versions; RANK and WORLD_SIZE as torchrun sets them

Prints a line of JSON after each push, or after its failure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from conftest import make_model

from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.parallel.config import ParallelConfig
from megarl.reshard.config import ReshardConfig
from megarl.reshard.coordinator import WeightSyncError
from megarl.reshard.session import WeightSession
from megarl.reshard.transports.gloo import GlooTransport


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
    """This rank is killed as it sends its second message."""
    send, sent = GlooTransport.send, []

    def send_once(self: GlooTransport, slot: int, nbytes: int, peer: int, tag: int) -> Any:
        sent.append(tag)
        if len(sent) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(self, slot, nbytes, peer, tag)

    GlooTransport.send = send_once  # type: ignore[method-assign]


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    family = settings["family"]
    engine = MegatronEngine(EngineConfig(path=settings["checkpoint"]), ParallelConfig(**settings["layout"]))
    engine.initialize()
    config = ReshardConfig(**settings["reshard"])
    session = WeightSession(config, settings["addresses"], settings["api_key"])
    for version in settings["versions"]:
        take(engine, family, version)
        if settings.get("victim") == engine.groups.rank and version == settings["versions"][-1]:
            die_in_the_middle(engine.groups.rank)
        try:
            report = session.push(engine, version)
        except WeightSyncError as error:
            failed = {name: getattr(error, name) for name in ("server", "rank", "phase", "tensor")}
            print(json.dumps({"failed": str(error), **failed}), flush=True)
            os._exit(3)  # as a trainer that stops: its other ranks may be gone
        print(json.dumps([report.version, report.bytes, report.verified]), flush=True)
    engine.save(Path(settings["exported"]))
    session.close()
    engine.destroy()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
