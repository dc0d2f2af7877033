"""Worker of every rank: steps with and without `parallel.overlap`, and the order of what overlaps.

Arguments: the work folder, and the cases as JSON {"name": case}. A case has `model`, `layout`, `fields` of the engine,
`reads` (what the loss takes; `token loss` is `TokenLoss`) and the batch's `sequences`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.pipeline_parallel import schedules
from safetensors.torch import load_file
from torch import Tensor

from megarl.actor import data_parallel
from megarl.actor.config import EngineConfig, LoraConfig, OptimizerConfig
from megarl.actor.critic import MegatronScalarEngine
from megarl.actor.engine import MegatronEngine
from megarl.actor.token_loss import TokenLoss
from megarl.ops import linear_logprob
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch
from tests.distributed.layout_worker import ADAM, logits_loss_fn, loss_fn, loss_weight_fn

BUCKET = 4000  # parameters in a bucket: many buckets, of a model that would fit into one
STEPS = 3


def value_loss(values: Tensor, data: PackedBatch) -> Tensor:
    mask = data["loss_mask"]
    return (((values - data["advantages"]) ** 2) * mask).sum() / mask.sum()


class Events:
    """Events of a step, in order: backward passes, and each bucket group's gradients and parameters."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """Comes before the engine, which binds a method of a bucket group."""
        self.names: dict[int, str] = {}
        self.log: list[tuple[str, str]] = []
        for method in ("start_grad_sync", "start_param_sync", "register_grad_ready"):
            patch.setattr(_ParamAndGradBucketGroup, method, self._noting(method))
        backward = schedules.backward_step

        def backward_step(*args: Any, **kwargs: Any) -> Any:
            self.log.append(("backward", "begin"))
            result = backward(*args, **kwargs)
            self.log.append(("backward", "end"))
            return result

        patch.setattr(schedules, "backward_step", backward_step)

    def _noting(self, method: str) -> Callable[..., Any]:
        plain = getattr(_ParamAndGradBucketGroup, method)

        def noting(group: Any, *args: Any, **kwargs: Any) -> Any:
            waits = method == "start_grad_sync" and group.is_first_batch and group.grad_reduce_handle is not None
            if not waits and (method != "register_grad_ready" or group.is_last_microbatch):
                self.log.append((method, self.names[id(group)]))
            return plain(group, *args, **kwargs)

        return noting

    def name_buckets(self, engine: MegatronEngine) -> None:
        self.names = {id(group): f"bucket {i}" for i, group in enumerate(data_parallel._bucket_groups(engine.ddps))}

    def taken(self) -> list[tuple[str, str]]:
        log, self.log = self.log, []
        return log


def engine_of(case: dict[str, Any], model: Path, overlap: bool) -> MegatronEngine:
    fields = {**case["fields"], "lora": LoraConfig(**case["fields"].get("lora", {}))}
    config = EngineConfig(path=str(model), optimizer=OptimizerConfig(**ADAM, clip_grad=1.0), **fields)
    parallel = ParallelConfig(**case["layout"], overlap=overlap)
    engine = MegatronScalarEngine(config, parallel) if case["reads"] == "values" else MegatronEngine(config, parallel)
    engine.initialize()
    return engine


def outputs(engine: MegatronEngine, case: dict[str, Any], batch: PackedBatch) -> Tensor:
    engine.eval()
    return engine.scores(batch) if isinstance(engine, MegatronScalarEngine) else engine.logprobs(batch)


def trained(engine: MegatronEngine, case: dict[str, Any], batch: PackedBatch, events: Events) -> dict[str, Any]:
    """Statistics, outputs and weights of some steps, read in between or not, and the events of each."""
    losses: dict[str, Any] = {
        "values": value_loss,
        "logits": logits_loss_fn,
        "logprobs": loss_fn,
        "token loss": loss_fn,
    }
    stats, logs, tensors = [], [], {}
    for step in range(STEPS):
        engine.train()
        reads: Any = TokenLoss(engine, loss_fn) if case["reads"] == "token loss" else case["reads"]
        stats.append(engine.train_batch(batch, losses[case["reads"]], loss_weight_fn, loss_input=reads))
        logs.append({"step": events.taken()})
        if step == 0:
            tensors["outputs"] = outputs(engine, case, batch)
            logs[-1]["forward"] = events.taken()
        if step != 1:  # after step 1, the next step's own forward pass gathers the parameters
            tensors |= {f"{step}.{name}": tensor.clone() for name, tensor in engine.named_weights()}
            logs[-1]["read"] = events.taken()
    return {"stats": stats, "logs": logs, "tensors": tensors, "buckets": list(events.names.values())}


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Hash of the tensors' bits."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def measure(work: Path, name: str, case: dict[str, Any]) -> None:
    stored = load_file(work / case["model"] / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored).select(case["sequences"])
    results = []
    for overlap in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            ddp_config = functools.partial(data_parallel.DistributedDataParallelConfig, bucket_size=BUCKET)
            patch.setattr(data_parallel, "DistributedDataParallelConfig", ddp_config)
            events = Events(patch)
            engine = engine_of(case, work / case["model"] / "model", overlap)
            events.name_buckets(engine)
            results.append(trained(engine, case, batch, events))
    plain, overlapped = results
    differences = {
        key: float((tensor - overlapped["tensors"][key]).abs().max())
        for key, tensor in plain["tensors"].items()
        if tensor.numel()
    }
    facts = {
        "differences": differences,
        "stats": [plain["stats"], overlapped["stats"]],
        "logs": [plain["logs"], overlapped["logs"]],
        "buckets": overlapped["buckets"],
        "digest": digest_of(plain["tensors"]),
        "weights": [mb.weight for mb in engine._microbatches(batch, loss_weight_fn)],
    }
    (work / f"{name}.rank{engine.groups.rank}.json").write_text(json.dumps(facts))
    groups.leave_layout()


def main(work: Path, cases: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    linear_logprob.cpu_chunk_rows = lambda total: 9  # several chunks
    for name, case in cases.items():
        measure(work, name, case)
    groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
