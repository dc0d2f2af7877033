"""Which device the trainer runs on, and what Megatron-core needs to run where there is no GPU.

Megatron-core 0.16.1 calls `torch.cuda` directly. Where no GPU is found, `prepare()` answers those calls for the
CPU: attributes of `torch.cuda` are replaced once, and `scope()` redirects tensors that ask for `device="cuda"`
while Megatron code runs. Every entry names the Megatron line that needs it; `tests/unit/parallel/test_platform.py`
fails when one is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def has_gpu() -> bool:
    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's layers can run: the package and a GPU."""
    return has_gpu() and importlib.util.find_spec("transformer_engine") is not None


def device() -> torch.device:
    """The device of this rank: its own GPU, or the CPU."""
    if has_gpu():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def collective_backend() -> str:
    """The torch.distributed backend of the device: nccl or gloo."""
    return "nccl" if has_gpu() else "gloo"


class _Inert:
    """Stands for a CUDA stream or event where everything runs in order on the host."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: Any) -> _Inert:
        return self


def _does_nothing() -> Callable[..., None]:
    """A function of its own for every attribute: torch.compile refuses one function under two names."""
    return lambda *_, **__: None


# attribute of torch.cuda -> (what answers it on the CPU, the Megatron-core 0.16.1 line that calls it)
CUDA_ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "current_device": (
        lambda: torch.device("cpu"),
        "distributed/param_and_grad_buffer.py:783 allocates the parameter and gradient buffers there",
    ),
    "synchronize": (_does_nothing(), "pipeline_parallel/p2p_communication.py:398 after each send and receive"),
    "current_stream": (_Inert, "pipeline_parallel/utils.py:332"),
    "default_stream": (_Inert, "distributed/param_and_grad_buffer.py:422"),
    "stream": (lambda *_: contextlib.nullcontext(), "distributed/param_and_grad_buffer.py:417"),
    "Stream": (_Inert, "distributed/distributed_data_parallel.py:230"),
    "Event": (_Inert, "pipeline_parallel/utils.py:158"),
    "empty_cache": (_does_nothing(), "distributed/distributed_data_parallel.py:594"),
    "manual_seed": (_does_nothing(), "tensor_parallel/random.py:422"),
    "get_rng_state": (lambda *_, **__: torch.zeros(0, dtype=torch.uint8), "tensor_parallel/random.py:235"),
}


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Counts of tokens as the collectives take them: gloo refuses split sizes that are a tensor."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather_along_first_dim(
    input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """Megatron's function of this name with parts of different lengths padded: gloo gathers equal ones only."""
    if group.size() == 1:
        return input_
    most = input_.shape[0] if output_split_sizes is None else max(output_split_sizes)
    padded = input_.new_zeros(most, *input_.shape[1:])
    padded[: input_.shape[0]] = input_
    parts = list(padded.new_empty(group.size() * most, *input_.shape[1:]).split(most)) if most else []
    if not parts:
        return padded
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:n] for part, n in zip(parts, output_split_sizes or [most] * len(parts), strict=True)])


# (module of megatron.core, attribute) -> (what takes its place on the CPU, the Megatron-core 0.16.1 line that needs it)
MEGATRON_ATTRIBUTES: dict[tuple[str, str], tuple[Any, str]] = {
    ("transformer.moe.moe_utils", "te_general_gemm"): (
        None,
        "transformer/moe/moe_utils.py:1192 asks whether it is None, and without Transformer Engine it is not defined",
    ),
    ("transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu"): (
        _on_host,
        "transformer/moe/token_dispatcher.py:879 makes split sizes of tensors, but only of those on a GPU",
    ),
    ("tensor_parallel.mappings", "_gather_along_first_dim"): (
        _gather_along_first_dim,
        "tensor_parallel/mappings.py:114 gathers parts of different lengths: experts' tokens over etp",
    ),
}

# distrib_optimizer.py:361, optimizer.py:671 and clip_grads.py:167 sort parameters by the spelling of their type
_TYPE_SPELLINGS = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


class _CudaMeansCpu(TorchFunctionMode):
    """`device="cuda"` is the CPU, `Tensor.cuda()` the tensor itself, `Tensor.type()` spells `torch.cuda.`.

    Needed by schedules.py:596 (`torch.zeros([], device="cuda")`), clip_grads.py:90, optimizer.py:473 and others.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return _TYPE_SPELLINGS.get(result, result)
        return result


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Runs Megatron code: on the CPU its CUDA requests are redirected, on a GPU nothing is changed."""
    if has_gpu():
        yield
        return
    with _CudaMeansCpu():
        yield


@contextlib.contextmanager
def outside_scope() -> Iterator[None]:
    """Inside a scope: runs code that names no CUDA device, without the redirection, which makes every torch call some
    microseconds longer."""
    if has_gpu():
        yield
        return
    with torch._C.DisableTorchFunction():
        yield


def _exchange_shapes(
    self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool
) -> tuple[list[int], list[int]]:
    """Tells the neighbouring stages the shapes of what follows, in the order in which they receive it."""
    from megatron.core.pipeline_parallel.p2p_communication import _p2p_ops

    def shape_of(tensor: Any) -> Any:
        return None if tensor is None else torch.tensor(tensor.shape, dtype=torch.int64, device=device())

    prev, following = (torch.zeros(3, dtype=torch.int64, device=device()) for _ in range(2))
    requests = _p2p_ops(
        tensor_send_prev=shape_of(send_prev),
        tensor_recv_prev=prev if recv_prev else None,
        tensor_send_next=shape_of(send_next),
        tensor_recv_next=following if recv_next else None,
        group=self.pp_group,
        prev_pipeline_rank=self.prev_rank,
        next_pipeline_rank=self.next_rank,
    )
    # A neighbour may take a send only in its next exchange, after the tensor that it waits for: sends are kept, not
    # waited for. They are over when the tensors that they announce have been sent.
    self.sent_shapes = [*getattr(self, "sent_shapes", []), *requests.values()]
    for name in ("recv_prev", "recv_next"):
        if name in requests:
            requests[name].wait()
    return prev.tolist(), following.tolist()


@functools.cache
def prepare() -> None:
    """Makes Megatron-core usable on this machine. Call before building a model; idempotent."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.tensor_parallel import random as megatron_random

    # p2p_communication.py:165 sends shapes to the previous stage first, but receives from it first too: where two
    # stages are each other's previous and next, one direction's shapes are taken for the other's.
    P2PCommunicator._communicate_shapes = _exchange_shapes
    if has_gpu():
        torch.cuda.set_device(device())
        return
    for name, (answer, _) in CUDA_ATTRIBUTES.items():
        setattr(torch.cuda, name, answer)
    for (module, name), (answer, _) in MEGATRON_ATTRIBUTES.items():
        setattr(importlib.import_module(f"megatron.core.{module}"), name, answer)
    # tensor_parallel/random.py: CudaRNGStatesTracker.fork swaps CUDA generator states; dropout must be 0
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True)
    # tensor_parallel/random.py:447 and :457: recomputed regions store and restore the CUDA generator's state
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.zeros(0, dtype=torch.uint8)
    megatron_random._set_cuda_rng_state = _does_nothing()
