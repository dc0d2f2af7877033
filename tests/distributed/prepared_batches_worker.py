"""Worker of every rank: the training lines of AReaL's data set page, with a server that counts up from the prompt.

Arguments: the work folder, and the layout's knobs as JSON. Writes each rank's batches, and the error of a bad loader.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web

from megarl.actor.config import OptimizerConfig
from megarl.areal import ActorConfig, FinetuneSpec, FSDPPPOActor, RemoteSGLangEngine, RolloutWorkflow
from megarl.knobs import UserError
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.rollout.config import RolloutConfig
from megarl.rollout.executor import LoopThread
from megarl.types import GenerationHyperparameters, ModelRequest
from tests.unit.rollout.fault_server import Server, respond, tokens_of

STEPS = 2


class Counting(RolloutWorkflow):
    """One completion of a prompt of two tokens, rewarded by `scale` times the prompt's row."""

    def __init__(self, gconfig: GenerationHyperparameters, scale: float) -> None:
        self.gconfig, self.scale = gconfig, scale

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        request = ModelRequest(input_ids=[data["row"], data["row"] + 1], gconfig=self.gconfig)
        answer = await engine.agenerate(request)
        tokens, prompt = answer.input_tokens + answer.output_tokens, answer.input_len
        return {
            "input_ids": torch.tensor([tokens]),
            "loss_mask": torch.tensor([[0] * prompt + [1] * answer.output_len]),
            "rollout_logprobs": torch.tensor([[0.0] * prompt + answer.output_logprobs]),
            "versions": torch.tensor([[-1] * prompt + answer.output_versions]),
            "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool),
            "rewards": torch.tensor([self.scale * data["row"]]),
        }


class Loader:
    """Batches of two prompts, of this data parallel rank's rows alone."""

    batch_size = 2

    def __init__(self, rank: int, world_size: int, broken: bool = False) -> None:
        self.rows = range(10 + rank, 100, world_size)
        self.broken = broken

    def __iter__(self) -> Iterator[list[dict[str, int]]]:
        if self.broken:
            raise ValueError("the loader's file is gone")
        for at in range(0, len(self.rows), 2):
            yield [{"row": row} for row in self.rows[at : at + 2]]


async def reply(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    return respond(tokens_of(body))


class Trainer:
    """The lines of the page, with what they name."""

    def __init__(self, actor: FSDPPPOActor, rollout: RemoteSGLangEngine, config: Any) -> None:
        self.actor, self.rollout, self.config = actor, rollout, config
        self.train_dataloader = Loader(
            rank=self.actor.data_parallel_rank, world_size=self.actor.data_parallel_world_size
        )

    def batches(self) -> list[dict[str, Any]]:
        config, workflow = self.config, Counting
        workflow_kwargs = {"gconfig": config.gconfig.new(n_samples=1), "scale": 0.5}

        def dynamic_filter_fn(group: Any) -> bool:
            return int(group["input_ids"][0]) % 3 != 0

        found = []
        for global_step in range(STEPS):
            rollout_batch = self.actor.prepare_batch(
                self.train_dataloader,
                workflow=workflow,
                workflow_kwargs=workflow_kwargs,
                should_accept_fn=dynamic_filter_fn,
                group_size=config.gconfig.n_samples,
                dynamic_bs=self.config.dynamic_bs,
            )
            logp = self.actor.compute_logp(rollout_batch)
            self.rollout.set_version(global_step + 1)
            found.append(
                {
                    "step": global_step,
                    "prompts": rollout_batch["input_ids"][rollout_batch.cu_seqlens[:-1].long()].tolist(),
                    "rewards": rollout_batch["rewards"].tolist(),
                    "lengths": rollout_batch.lengths.tolist(),
                    "logp": float(logp.double().sum()),
                }
            )
        return found


def main(folder: Path, knobs: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    config = ActorConfig(
        path=str(folder / "model"), optimizer=OptimizerConfig(lr=1e-4), parallel=ParallelConfig(**knobs)
    )
    actor = FSDPPPOActor(config=config)
    actor.initialize(None, FinetuneSpec(1, STEPS, 1))
    rank, thread = dist.get_rank(), LoopThread("test-server")
    server = Server(thread, reply)
    rollout = RemoteSGLangEngine(RolloutConfig(max_head_offpolicyness=0))
    errors = []
    try:
        actor.prepare_batch(Loader(0, 1), workflow=Counting)
    except UserError as error:
        errors.append(str(error))
    rollout.initialize([server.address])
    actor.connect_engine(rollout)
    script = SimpleNamespace(gconfig=GenerationHyperparameters(n_samples=2, max_new_tokens=3), dynamic_bs=False)
    found = Trainer(actor, rollout, script).batches()
    other = RemoteSGLangEngine(RolloutConfig())
    other.initialize([server.address])
    actor.connect_engine(other)
    try:
        broken = Loader(0, 1, broken=actor.data_parallel_rank == actor.data_parallel_world_size - 1)
        arguments = {"gconfig": script.gconfig.new(n_samples=1), "scale": 1.0}
        actor.prepare_batch(broken, workflow=Counting, workflow_kwargs=arguments)
    except Exception as error:
        errors.append(str(error))
    place, asked = actor.data_parallel_rank, len(server.bodies)
    out = {"data_parallel_rank": place, "batches": found, "errors": errors, "asked": asked}
    (folder / f"prepared_{rank}.json").write_text(json.dumps(out))
    for engine in (rollout, other):
        engine.destroy()
    server.stop()
    thread.stop()
    groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
