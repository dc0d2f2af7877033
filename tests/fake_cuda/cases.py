"""What the engines do on the device: updates of every method, log-probs, checkpoints, offload. One function a case."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import streams
import torch
import torch.distributed as dist
import watch
from batches import batch, config, without
from torch import Tensor
from watch import WATCH

from megarl import algorithms
from megarl.actor import engine as engine_module
from megarl.actor.batch import feed
from megarl.actor.batch.microbatch import Labels, Microbatch
from megarl.actor.critic import MegatronPPOCritic, MegatronScalarEngine
from megarl.actor.engine import MegatronEngine
from megarl.actor.gpu.offload import PARTS, EngineMemory
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.reference import MegatronReference
from megarl.actor.supervised import MegatronLMEngine
from megarl.device_copies import to_device
from megarl.ops.logprob import linear_token_loss, vocab_parallel_logprobs
from megarl.ops.loss import segment_sum
from megarl.parallel import broadcast
from megarl.parallel.config import ParallelConfig
from megarl.types import ROUTED_EXPERTS, PackedBatch


def on_device(engine: MegatronEngine) -> None:
    """Asserts that parameters, gradients and main parameters lie on the device."""
    for module in engine.modules:
        assert {p.device.type for p in module.parameters()} == {"cuda"}
    for ddp in engine.ddps:
        assert {buffer.grad_data.device.type for buffer in ddp.buffers} == {"cuda"}
    for group in engine.optimizer.param_groups if engine.optimizer else []:
        assert {p.device.type for p in group["params"]} <= {"cuda"}


def asking(counts: Counter[str], name: str, call: Callable[[], Any]) -> Any:
    """The result of `call`, which counts under `name` how often CUDA is asked for its free memory."""
    plain = torch.cuda.mem_get_info

    def counted(*arguments: Any) -> tuple[int, int]:
        counts[name] += 1
        return plain(*arguments)

    torch.cuda.mem_get_info = counted
    try:
        return call()
    finally:
        torch.cuda.mem_get_info = plain


def sft(path: str, layout: ParallelConfig | None = None, **fields: Any) -> dict[str, Any]:
    """The second of two supervised steps, log-probs after it, and the losses of both."""
    engine = MegatronLMEngine(config(path, **fields), layout)
    engine.initialize()
    on_device(engine)
    data = without(batch(), *([] if fields.get("shared_prefix") else ["group_ids"]), "pair_ids")
    first = engine.train_lm(data)
    asked = Counter[str]()
    second, waits = WATCH.counted(lambda: asking(asked, "update", lambda: engine.train_lm(data)))
    scored = lambda: engine.logprobs(data, trained_only=True)  # noqa: E731
    logprobs, reading = WATCH.counted(lambda: asking(asked, "log-probs", scored))
    _, evaluation = WATCH.counted(lambda: engine.evaluate_lm(data))
    assert logprobs.device.type == "cpu"
    return {
        "losses": [first["loss"], second["loss"]],
        "norm": second["grad_norm"],
        "logprobs": logprobs.tolist(),
        "waits": waits,
        "logprob_waits": reading,
        "evaluation_waits": evaluation,
        "memory_questions": dict(asked),
    }


def fed(
    path: str, microbatches: int, fault: str = "", on_device: bool = False, layout: ParallelConfig | None = None
) -> dict[str, Any]:
    """A step over equal microbatches: its loss, its waits, and the most bytes of the device beyond those before it."""
    engine = MegatronLMEngine(config(path), layout)
    engine.initialize()
    data = PackedBatch.concat([without(batch(), "group_ids", "pair_ids")] * microbatches)
    data.shared = True
    engine.train_lm(data)
    data = data.to("cuda") if on_device else data
    if fault == "no wait":
        streams.Stream.wait_event = lambda *_: None  # type: ignore[method-assign]
    elif fault == "no record":
        torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    gc.collect()
    WATCH.settle()
    memory = WATCH.memory
    before = memory.most = memory.live
    stats, waits = WATCH.counted(lambda: engine.train_lm(data))
    WATCH.settle()
    return {"loss": stats["loss"], "waits": waits, "bytes": memory.most - before, "left": memory.live - before}


def handed_out(path: str, layout: ParallelConfig | None = None) -> dict[str, Any]:
    """Most bytes of the device while a batch with routes is broadcast in pieces, and the bytes of the routes."""
    engine = MegatronLMEngine(config(path), layout)
    engine.initialize()
    data = without(batch(), "group_ids", "pair_ids")
    routes = torch.arange(data.total_tokens * 64 * 8, dtype=torch.int16).view(-1, 64, 8)
    data.set_tokens(ROUTED_EXPERTS, routes)
    plain, on_host = dist.broadcast, watch.ON_HOST

    def held(tensor: Tensor) -> Tensor:
        """The tensor as gloo gets it, which a thread lets go of late: gloo's may, on a busy machine."""
        host = on_host(tensor)
        threading.Timer(0.02, host.size).start()
        return host

    def released(tensor: Tensor, src: int) -> None:
        """Broadcasts, and waits until nothing but the caller holds the tensor."""
        plain(tensor, src)
        WATCH.settle()

    dist.broadcast, watch.ON_HOST = released, held
    memory, broadcast.PIECE_BYTES = WATCH.memory, 4096
    before = memory.most = memory.live
    received = broadcast.broadcast_batch(data if engine.groups.rank == 0 else None)
    found = memory.most - before
    assert torch.equal(received[ROUTED_EXPERTS], routes)
    assert found <= 2 * 4096, f"rank {engine.groups.rank}: {found} bytes"
    return {"bytes": found, "routes": routes.nbytes}


def copied() -> dict[str, Any]:
    """Facts of a copy of several tensors to the device."""
    odd, mask = torch.arange(5, dtype=torch.int16), torch.tensor([True, False])
    value = {"odd": odd, "mask": mask, "none": torch.empty(0), "scalar": torch.tensor(3.0), "again": odd}
    value["turned"] = torch.arange(6).view(2, 3).t()
    moved, waits = WATCH.counted(lambda: to_device(value, "cuda"))
    versions = [moved["mask"]._version, moved["odd"].fill_(7) is None, moved["mask"]._version]
    same = [torch.equal(moved[name].cpu(), value[name]) for name in ("mask", "none", "scalar", "turned")]
    return {
        "same": same,
        "devices": sorted({x.device.type for x in moved.values()}),
        "storages": len({x.untyped_storage()._cdata for x in moved.values() if x.numel()}),
        "aligned": all(x.storage_offset() * x.itemsize % 128 == 0 for x in moved.values()),
        "once": moved["odd"] is moved["again"],
        "versions": versions[::2],
        "waits": waits,
    }


def policy(path: str, layout: ParallelConfig | None = None, **fields: Any) -> dict[str, Any]:
    """An update of GRPO, with a reference and a correction, from the log-probs of its own forward pass."""
    knobs = {"kl_coef": 0.1, "kl_in": "loss", "correction": "truncate", "aggregate": "sequence", "entropy_coef": 0.1}
    name = fields.pop("algorithm", "GRPO")
    algorithm = getattr(algorithms, name)(getattr(algorithms, f"{name}Config")(**knobs))
    engine = MegatronPPOActor(config(path, **fields), algorithm, layout)
    engine.initialize()
    data = without(batch(), "pair_ids")
    data["versions"] = torch.zeros(data.total_tokens, dtype=torch.long)
    engine.compute_advantages(data)
    engine.ppo_update(without(data))
    stats, waits = WATCH.counted(lambda: engine.ppo_update(data))
    return {"stats": stats, "waits": waits}


def preference(path: str, name: str) -> dict[str, Any]:
    """A step of an offline method."""
    algorithm = getattr(algorithms, name)(getattr(algorithms, f"{name}Config")())
    of_values = name == "RewardModel"
    engine = MegatronScalarEngine(config(path)) if of_values else MegatronEngine(config(path))
    engine.initialize()
    data = without(batch(), *([] if algorithm.paired else ["pair_ids"]), "group_ids")

    def step() -> dict[str, float]:
        reads: Any = "values" if of_values else "logprobs"
        loss = algorithm.loss
        return engine.train_batch(data, loss, algorithm.loss_weight, loss_input=reads)

    step()
    stats, waits = WATCH.counted(step)
    return {"stats": stats, "waits": waits}


def critic(path: str) -> dict[str, Any]:
    """Values, advantages and an update of PPO's critic."""
    algorithm = algorithms.PPO(algorithms.PPOConfig())
    engine = MegatronPPOCritic(config(path), algorithm)
    engine.initialize()
    data = without(batch(), "pair_ids")
    values, reading = WATCH.counted(lambda: engine.compute_values(data))
    assert values.device.type == "cpu"
    data["values"] = values
    data["advantages"] = algorithm.advantages(data)
    engine.ppo_update(data)
    stats, waits = WATCH.counted(lambda: engine.ppo_update(data))
    return {"stats": stats, "waits": waits, "value_waits": reading}


def logits(path: str) -> dict[str, Any]:
    """A user's loss on logits, and a forward pass with a hook."""
    engine = MegatronEngine(config(path))
    engine.initialize()
    data = without(batch(), "pair_ids", "group_ids")

    def loss(values: Tensor, part: PackedBatch) -> Tensor:
        labels = part["input_ids"].roll(-1)
        return torch.nn.functional.cross_entropy(values.float(), labels)

    engine.train_batch(data, loss, lambda part: part.total_tokens)
    stats, waits = WATCH.counted(lambda: engine.train_batch(data, loss, lambda part: part.total_tokens))
    top = engine.forward(data, post_hook=lambda values, _: values.argmax(-1))
    return {"stats": stats, "waits": waits, "tokens": len(top)}


def state(path: str, folder: str, **fields: Any) -> dict[str, Any]:
    """Checkpoints in both formats and rests on the host, each followed by a step like one without them."""
    data = without(batch(), "pair_ids", "group_ids")
    straight = MegatronLMEngine(config(path, **fields))
    straight.initialize()
    losses = [straight.train_lm(data)["loss"] for _ in range(3)]
    engine = MegatronLMEngine(config(path, **fields))
    engine.initialize()
    engine.train_lm(data)
    engine.save_state(Path(folder) / "state")
    engine.save(Path(folder) / "hf")
    resumed = MegatronLMEngine(config(path, **fields))
    resumed.initialize()
    resumed.load_state(Path(folder) / "state")
    on_device(resumed)
    memory = EngineMemory(resumed)
    again = []
    for _ in range(2):
        again.append(resumed.train_lm(data)["loss"])
        memory.offload(*PARTS)
        memory.restore(*PARTS)
    exported = MegatronReference(config(str(Path(folder) / "hf"), **fields))
    exported.initialize()
    before = exported.compute_logp(data)
    exported.offload()
    assert torch.equal(before, exported.compute_logp(data))
    return {"straight": losses[1:], "resumed": again}


def loaded(path: str, folder: str, **fields: Any) -> dict[str, Any]:
    """The weights of a file, loaded into a trained engine, and its weights after a step of no size."""
    data = without(batch(), "pair_ids", "group_ids")
    engine = MegatronLMEngine(config(path, **fields))
    engine.initialize()
    engine.save(Path(folder) / "hf")
    started = engine.train_lm(data)["loss"]
    engine.train_lm(data)
    moved = dict(engine.named_weights())
    engine.load(Path(folder) / "hf")
    weights = dict(engine.named_weights())
    assert any(not torch.equal(weights[name], moved[name]) for name in weights)
    for group in engine.optimizer.param_groups:
        group["max_lr"] = group["min_lr"] = group["lr"] = 0.0
    loss = engine.train_lm(data)["loss"]
    after = dict(engine.named_weights())
    return {
        "losses": [started, loss],
        "moved": [name for name in weights if not torch.equal(weights[name], after[name])],
    }


def skipped(main: bool) -> dict[str, Any]:
    """Errors of gradients without most columns, over the largest exact ones, and the share of rows without any."""
    torch.manual_seed(5)
    x, w = (torch.randn(n, 12) * 0.5 for n in (40, 400))
    x[:, 0], w[:, 0] = 1.0, -6 * torch.arange(1, 401).log()
    labels = (torch.arange(40) % 10).to("cuda")
    found = []
    for share in (0.0, 0.02):
        hidden, weight = (t.to("cuda", torch.bfloat16).requires_grad_() for t in (x, w))
        main_grad = torch.zeros(400, 12, device="cuda") if main else None
        keys = {"vocab_valid": 400, "chunk_rows": 17, "skipped": share, "main_grad": main_grad, "loss_grad": 1.0}
        loss, *_ = linear_token_loss(hidden, weight, labels, lambda logprobs, *_: logprobs, **keys)
        loss.backward()
        found.append([t.float().cpu() for t in (hidden.grad, main_grad if main else weight.grad)])
    return {
        "errors": [float((got - exact).abs().max() / exact.abs().max()) for exact, got in zip(*found, strict=True)],
        "left out": float((found[1][1] == 0).all(1).float().mean()),
    }


def debug_kernels(path: str) -> dict[str, Any]:
    """Errors and waits of operations whose values do not fit, before and after an engine with `debug_kernels`.

    The values do no harm: the kernels of this device, which are the CPU's, give NaN or sums of other tokens.
    """
    x, mask = torch.ones(4, device="cuda"), torch.ones(4, dtype=torch.bool, device="cuda")
    logits, labels = torch.ones(4, 6, device="cuda"), torch.tensor([0, 1, 2, 6], device="cuda")
    bounds, temperatures = torch.tensor([0, 3, 2, 4], dtype=torch.int32, device="cuda"), -x
    calls: dict[str, Any] = {
        "cu_seqlens": lambda: segment_sum(x, mask, bounds),
        "labels": lambda: vocab_parallel_logprobs(logits, labels, vocab_valid=6),
        "temperatures": lambda: vocab_parallel_logprobs(logits, labels - 1, vocab_valid=6, temperature=temperatures),
    }

    def said(call: Any) -> str:
        try:
            _, waits = WATCH.counted(call)
        except ValueError as error:
            return str(error)
        return f"{len(waits)} waits"

    before = {name: said(call) for name, call in calls.items()}
    MegatronEngine(config(path, debug_kernels=True))
    return {"before": before, "after": {name: said(call) for name, call in calls.items()}}


def notices() -> dict[str, Any]:
    """What the watch says of single operations: a wait's kind, or the error."""
    numbers, host = torch.arange(4.0, device="cuda"), torch.ones(4)
    pinned = torch.empty(4, pin_memory=True)

    def early() -> Tensor:
        pinned.copy_(numbers, non_blocking=True)
        return pinned + 1

    def late() -> Tensor:
        pinned.copy_(numbers, non_blocking=True)
        torch.cuda.synchronize()
        return pinned + 1

    calls: dict[str, Any] = {
        "item": lambda: numbers[0].item(),
        "float": lambda: float(numbers[0]),
        "bool": lambda: bool(numbers.any()),
        "tolist": numbers.tolist,
        "cpu": numbers.cpu,
        "nonzero": lambda: numbers.nonzero(),
        "mask": lambda: numbers[numbers > 1],
        "fill by mask": lambda: numbers.clone().__setitem__(numbers > 1, 0),
        "repeat": lambda: torch.ones(2, device="cuda").repeat_interleave(numbers[:2].long()),
        "tensor": lambda: torch.tensor([1.0], device="cuda"),
        "to": lambda: host.to("cuda"),
        "to without waiting": lambda: host.pin_memory().to("cuda", non_blocking=True),
        "to of pageable memory": lambda: host.to("cuda", non_blocking=True),
        "add a number": lambda: numbers + torch.tensor(1.0),
        "add host": lambda: numbers + host,
        "index by host": lambda: numbers.index_select(0, torch.tensor([1])),
        "numpy": numbers.numpy,
        "reduce host": lambda: torch.distributed.all_reduce(host),
        "read early": early,
        "read late": late,
    }
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    heard = {}
    for name, call in calls.items():
        WATCH.arriving.clear()
        try:
            heard[name] = sorted({place.rpartition(": ")[2] for place in WATCH.counted(call)[1]})
        except (RuntimeError, TypeError) as error:
            heard[name] = [type(error).__name__]
    return heard


def planted(path: str, fault: str) -> dict[str, Any]:
    """`sft` by an engine with a fault."""
    to, finite = feed.to_device, engine_module.gradients_are_finite

    def to_device_but_masks(mb: Microbatch, device: Any) -> Microbatch:
        moved = to(mb, device)
        moved.aligned.tokens["loss_mask"] = mb.aligned["loss_mask"]
        return moved

    def labels_on_host(mb: Microbatch, device: Any) -> Microbatch:
        labels = mb.trained_labels
        return dataclasses.replace(to(mb, device), trained_labels=Labels(to(labels.ids, device), labels.rows))

    def each_buffer_read(ddps: list[Any]) -> bool:
        return finite(ddps) and all(float(p.main_grad.sum()) < 1e9 for ddp in ddps for p in ddp.parameters())

    if fault == "mask on the host":
        feed.to_device = to_device_but_masks
    elif fault == "rows on the host":
        feed.to_device = labels_on_host
    else:
        engine_module.gradients_are_finite = each_buffer_read
    return sft(path)
