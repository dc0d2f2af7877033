"""Worker of every rank: for each layout and model, computes log-probs, trains two steps, and writes the results.

Arguments: the work folder, layouts as JSON {"name": {parallel knobs}}, and their models as JSON {"name": [model]}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.weights import hf_weights
from megarl.ops.logprob import gather_logprobs_entropy
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch

# A large eps makes Adam's update a smooth function of the gradient. With a usual eps, elements with almost no gradient
# move by a full lr in a direction decided by rounding, so results could not be compared.
ADAM = {"lr": 0.3, "adam_eps": 1.0}
ENTROPY_BONUS = 0.1


def loss_fn(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy-gradient loss with an entropy bonus, which tests both gradients."""
    mask = data["loss_mask"].bool()
    loss = -((logprobs * data["advantages"] + ENTROPY_BONUS * entropy) * mask).sum() / mask.sum()
    return loss, {"nll_max": (-logprobs.detach() * mask).max()}


def loss_weight_fn(data: PackedBatch) -> Tensor:
    return data["loss_mask"].sum()


def logits_loss_fn(logits: Tensor, data: PackedBatch) -> Tensor:
    """`loss_fn` on logits `[tokens, vocabulary]`, as a user would write it: row i predicts token i + 1."""
    ends = data.cu_seqlens[1:].long() - 1
    mask = data["loss_mask"].roll(-1).bool().index_fill(0, ends, False)
    logprobs, entropy = gather_logprobs_entropy(logits, data["input_ids"].roll(-1))
    return -((logprobs * data["advantages"].roll(-1) + ENTROPY_BONUS * entropy) * mask).sum() / mask.sum()


def gather_gradients(engine: MegatronEngine) -> dict[str, Tensor]:
    """Collects the last step's gradients under HF names.

    All-gathers every rank's shard of the gradients, then gathers them like weights, in place of the parameters.
    """
    for ddp in engine.ddps:
        for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
            replicas = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shard = bucket.grad_data.chunk(replicas.size())[replicas.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=replicas)
    engine.shards()  # with overlap, parameters are gathered when they are read
    trained = [param for param in hf_weights.parameters(engine.modules) if param.requires_grad]
    weights, lora = [param.detach().clone() for param in trained], engine._weights.lora
    with torch.no_grad():
        for param in trained:
            param.copy_(param.main_grad)
        named = engine.named_weights()
        if lora is not None:
            named = hf_weights.gather(lora.shards(), torch.float32, lora.table, engine.groups)
        by_name = {name: tensor.clone() for name, tensor in named}
        for param, value in zip(trained, weights, strict=True):
            param.copy_(value)
    return by_name


def measure(folder: Path, parallel: ParallelConfig, out: Path) -> None:
    """Computes and writes the results that the test compares, for one checkpoint and one layout."""
    stored = load_file(folder / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)
    optimizer = OptimizerConfig(**ADAM, clip_grad=1.0)
    config = EngineConfig(path=str(folder / "model"), max_tokens_per_mb=60, optimizer=optimizer)
    engine = MegatronEngine(config, parallel)
    engine.initialize()
    result = {"logprobs": engine.eval().logprobs(batch)}
    result["one_by_one"] = torch.cat([engine.logprobs(batch.select([i])) for i in range(batch.num_seqs)])
    result["best"] = engine.forward(batch, lambda logits, _: logits.argmax(-1))
    result.update({f"before.{name}": t.clone() for name, t in engine.named_weights()})
    engine.train()
    stats = [engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")]
    result.update({f"gradient.{name}": t for name, t in gather_gradients(engine).items()})
    stats.append(engine.train_batch(batch, logits_loss_fn, loss_weight_fn, loss_input="logits"))
    result.update({f"after.{name}": t.clone() for name, t in engine.named_weights()})
    engine.save(out / "exported")
    if engine.groups.rank == 0:
        save_file(result, out / "out.safetensors")
        (out / "stats.json").write_text(json.dumps(stats))


def run_layouts(
    measure: Callable[[Path, ParallelConfig, Path], None],
    work: Path,
    layouts: dict[str, dict[str, Any]],
    models: dict[str, list[str]],
) -> None:
    """Creates each layout in the same processes, and measures its models."""
    torch.set_num_threads(1)
    for name, knobs in layouts.items():
        for model in models[name]:
            out = work / model / name
            out.mkdir(exist_ok=True)
            measure(work / model, ParallelConfig(**knobs), out)
        groups.leave_layout()
    groups.destroy()


if __name__ == "__main__":
    run_layouts(measure, Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
