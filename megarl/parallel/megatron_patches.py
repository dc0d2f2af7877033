"""Patches of Megatron-core 0.19.2, and one of torch. Two fit it to other packages' versions; the others are for CPUs.

Megatron-core calls `torch.cuda` directly. Without a GPU, `prepare()` replaces attributes of `torch.cuda` and of
Megatron once, so that these calls work on the CPU. `scope()` redirects tensors created with `device="cuda"` while
Megatron builds models and steps optimizers. Every entry names the Megatron line that needs it.
`tests/unit/parallel/test_megatron_patches.py` fails when an entry is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megarl.knobs import UserError
from megarl.parallel import platform


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


class _Inert:
    """Stands in for a CUDA stream or event. On the CPU everything already runs in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: Any) -> _Inert:
        return self


def _does_nothing() -> Callable[..., None]:
    """Returns a new no-op function. torch.compile refuses one function under two names."""
    return lambda *_, **__: None


# attribute of torch.cuda -> (replacement on the CPU, the Megatron-core 0.19.2 line that calls it)
CUDA_ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "current_device": (
        lambda: torch.device("cpu"),
        "distributed/param_and_grad_buffer.py:1162 allocates the parameter and gradient buffers there",
    ),
    "synchronize": (_does_nothing(), "pipeline_parallel/p2p_communication.py:419 after each send and receive"),
    "current_stream": (_Inert, "pipeline_parallel/utils.py:398"),
    "stream": (lambda *_: contextlib.nullcontext(), "distributed/param_and_grad_buffer.py:686"),
    "Stream": (_Inert, "distributed/distributed_data_parallel.py:297"),
    "Event": (_Inert, "pipeline_parallel/utils.py:192"),
    "empty_cache": (_does_nothing(), "distributed/distributed_data_parallel.py:655"),
    "manual_seed": (_does_nothing(), "tensor_parallel/random.py:490"),
    "get_rng_state": (lambda *_, **__: torch.zeros(0, dtype=torch.uint8), "tensor_parallel/random.py:303"),
}


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Converts token counts for the collectives: gloo refuses split sizes given as a tensor."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather_along_first_dim(
    input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """Megatron's function of this name, with parts padded to one length: gloo gathers only equal parts."""
    if group.size() == 1:
        return input_
    rows = input_.shape[0] if output_split_sizes is None else max(output_split_sizes)
    padded = input_.new_zeros(rows, *input_.shape[1:])
    padded[: input_.shape[0]] = input_
    parts = list(padded.new_empty(group.size() * rows, *input_.shape[1:]).split(rows)) if rows else []
    if not parts:
        return padded
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:n] for part, n in zip(parts, output_split_sizes or [rows] * len(parts), strict=True)])


class _TorchOfSchedules:
    """The torch module as the pipeline schedules see it, with `zeros(device="cuda")` on the CPU.

    Narrower than `scope`, which would slow down every torch call of a step by some microseconds.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        """`torch.zeros`, with any CUDA device replaced by the CPU."""
        return torch.zeros(*size, device=torch.device("cpu") if _is_cuda(device) else device, **options)


# (module of megatron.core, attribute) -> (replacement on the CPU, the Megatron-core 0.19.2 line that needs it)
MEGATRON_ATTRIBUTES: dict[tuple[str, str], tuple[Any, str]] = {
    ("pipeline_parallel.schedules", "torch"): (
        _TorchOfSchedules(),
        "pipeline_parallel/schedules.py:749 counts tokens in a tensor on the GPU",
    ),
    ("transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu"): (
        _on_host,
        "transformer/moe/token_dispatcher.py:927 converts tensors to split sizes, but only tensors on a GPU",
    ),
    ("tensor_parallel.mappings", "_gather_along_first_dim"): (
        _gather_along_first_dim,
        "tensor_parallel/mappings.py:118 gathers parts of different lengths: tokens of experts over etp",
    ),
}


class _Works(list[Any]):
    """Collectives under way that are waited for together."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def _gather_apart() -> None:
    """Has gloo gather the buckets of parameters one by one, where Megatron asks for all at once.

    Megatron's `_coalescing_manager` (distributed/param_and_grad_buffer.py:504) takes gloo's coalesced gather. In torch
    2.13 that damages the heap if gloo's thread ends the work before the caller has left the call, as a group of one
    rank does: "malloc(): unaligned tcache chunk detected", or a segmentation fault.
    """
    group: Any = torch.distributed.ProcessGroup
    gather = group.all_gather_single

    def all_gather_single_coalesced(
        group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> _Works:
        return _Works(gather(group, *pair, options) for pair in zip(outputs, inputs, strict=True))

    group.all_gather_single_coalesced = all_gather_single_coalesced


# distrib_optimizer.py:466, optimizer.py:1028 and clip_grads.py:174 sort parameters by the name of their type
_TYPE_SPELLINGS = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


class _CudaMeansCpu(TorchFunctionMode):
    """Redirects CUDA requests to the CPU.

    `device="cuda"` creates CPU tensors, `Tensor.cuda()` returns the tensor itself, and `Tensor.type()` names the
    `torch.cuda` type.

    Needed by schedules.py:749 (`torch.zeros([], device="cuda")`), clip_grads.py:108, optimizer.py:690 and others.
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
    """Redirects Megatron's requests for CUDA to the CPU while open. On a GPU it changes nothing."""
    if not platform.needs_cpu_patches():
        yield
        return
    with _CudaMeansCpu():
        yield


@contextlib.contextmanager
def one_group(world: int) -> Iterator[None]:
    """Gives a world of one rank its only group wherever Megatron asks for one. A larger world is left alone.

    Megatron makes 24 groups (parallel_state.py:232), and gloo starts three threads for each. One of them wakes 100
    times a second.
    """
    from megatron.core import parallel_state

    if world > 1:
        yield
        return
    create = parallel_state.create_group
    parallel_state.create_group = lambda *_, **__: torch.distributed.group.WORLD
    try:
        yield
    finally:
        parallel_state.create_group = create


def _restore_norm_kernels() -> None:
    """Gives the norm and the clipping of gradients Transformer Engine's kernels, before its version 2.13.

    Megatron imports four names at once (optimizer/clip_grads.py:11). The fourth came with 2.13, so before it Megatron
    takes loops of its own, which copy every tensor's norm to the host.
    """
    from megatron.core.optimizer import clip_grads
    from transformer_engine.pytorch import optimizers

    if clip_grads.multi_tensor_scale_tensor_impl is None:
        clip_grads.multi_tensor_applier = optimizers.multi_tensor_applier
        clip_grads.l2_norm_impl = optimizers.multi_tensor_l2norm
        clip_grads.multi_tensor_scale_impl = optimizers.multi_tensor_scale


def _route_with_the_biases_dtype() -> None:
    """Gives Transformer Engine's product of a router a bias of the output's dtype.

    cuBLAS reads a bias as the output's type. Megatron asks for float32 and passes a bias of the parameters' type
    (transformer/moe/moe_utils.py:1327), so 16 bits would be misread. Tensors in float32 go to torch: Transformer Engine
    multiplies them in TF32.
    """
    from megatron.core.transformer.moe import moe_utils

    product = moe_utils.te_general_gemm

    def general_gemm(
        a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, layout: str, bias: Any = None, **options: Any
    ) -> Any:
        bias = None if bias is None else bias.to(dtype)
        if layout == "TN" and a.dtype == b.dtype == torch.float32:
            return [torch.nn.functional.linear(b, a, bias)]
        return product(a, b, dtype, layout=layout, bias=bias, **options)

    moe_utils.te_general_gemm = general_gemm


def _share_offloading() -> None:
    """Lets copies of a configuration share its context of offloaded activations.

    Some layers copy the configuration deeply (shared experts, attention with fewer key-value heads than ranks), and
    the context holds CUDA streams, which cannot be copied.
    """
    from megatron.core.transformer import transformer_block

    made = transformer_block.get_cpu_offload_context

    def get_cpu_offload_context(*arguments: Any, **options: Any) -> Any:
        context, synchronize = made(*arguments, **options)
        if not isinstance(context, contextlib.nullcontext):
            type(context).__deepcopy__ = lambda this, _: this
        return context, synchronize

    transformer_block.get_cpu_offload_context = get_cpu_offload_context


def provide_deep_ep() -> None:
    """Gives Megatron's flex dispatcher DeepEP from its version 2 on.

    Megatron imports `EventOverlap` from `deep_ep.utils` (transformer/moe/fused_a2a.py:12) and takes DeepEP for missing
    where that fails. Version 2 moved the class to `deep_ep.utils.event`.

    Raises:
        UserError: the package does not load.
    """
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    if fused_a2a.HAVE_DEEP_EP:
        return
    try:
        from deep_ep import utils
        from deep_ep.utils.event import EventOverlap
    except (ImportError, AssertionError, OSError) as error:
        raise UserError(
            f"actor.moe_dispatcher=flex needs the package deep_ep, which does not load here ({error}); mend it, or set "
            "actor.moe_dispatcher=alltoall"
        ) from error
    utils.EventOverlap = EventOverlap
    importlib.reload(fused_a2a)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))


@functools.cache
def prepare() -> None:
    """Makes Megatron-core usable on this machine. Idempotent; call it before building a model."""
    from megatron.core.tensor_parallel import random as megatron_random

    if platform.has_transformer_engine():
        _restore_norm_kernels()
        _route_with_the_biases_dtype()
        _share_offloading()
    if platform.collective_backend() == "gloo":
        _gather_apart()
    if not platform.needs_cpu_patches():
        torch.cuda.set_device(platform.device())
        return
    for name, (replacement, _) in CUDA_ATTRIBUTES.items():
        setattr(torch.cuda, name, replacement)
    for (module, name), (replacement, _) in MEGATRON_ATTRIBUTES.items():
        setattr(importlib.import_module(f"megatron.core.{module}"), name, replacement)
    # tensor_parallel/random.py: CudaRNGStatesTracker.fork swaps CUDA generator states. The inference tracker does not;
    # it is correct because dropout is 0.
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True)
    # tensor_parallel/random.py:528 and :538: recomputed regions save and restore the CUDA generator's state
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.zeros(0, dtype=torch.uint8)
    megatron_random._set_cuda_rng_state = _does_nothing()
