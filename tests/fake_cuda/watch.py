"""Watches the operations on the device: refuses mixed devices, and counts the waits of the host."""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import megatron.core
import streams
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import megarl

ROOTS = {"megarl": Path(megarl.__file__).parent, "megatron/core": Path(megatron.core.__file__).parent}
STAND_IN = Path(__file__).parents[1] / "te" / "stand_in"  # its reads are not Transformer Engine's

# Operations whose result has a size or value that the host takes from the device.
READS = {
    **dict.fromkeys(("nonzero", "masked_select", "_unique2", "unique_consecutive", "bincount", "equal"), "size"),
    "_local_scalar_dense": "value",
}
COPIES = ("_to_copy", "copy_")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
ON_HOST = torch.ops.fake_cuda.on_host


class MixedDevices(RuntimeError):
    """An operation got tensors of host and device, or a collective a tensor of the host."""


class Watch(TorchDispatchMode):
    """Counts what makes the host wait for the device, by the function of megarl or Megatron that asks for it.

    Raises MixedDevices where a GPU refuses. A tensor of the host without dimensions is a number to most operations. A
    copy from the host with `non_blocking=True` may wait if its memory is not pinned: CUDA then copies it to a buffer of
    its own first. A single element does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()  # by place and kind
        self.pinned: set[int] = set()  # pinned host memory, by address
        self.arriving: set[int] = set()  # host memory to which a copy may still be on its way, by address
        self.memory = streams.Memory()
        self.handed: list[weakref.ref[Tensor]] = []  # tensors that gloo may still hold

    def __enter__(self) -> Watch:
        streams.note = self.note
        torch.Tensor.record_stream = lambda x, stream: self.memory.record(x.untyped_storage(), stream)  # type: ignore
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        streams.note = streams.ignore
        super().__exit__(kind, value, traceback)
        if value is None:
            self._raise_faults()

    def counted(self, call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
        """Runs `call` and returns its result and its waits, by place and kind."""
        self.waits.clear()
        self.pinned.clear()
        result = call()
        self._raise_faults()
        return result, {f"{place}: {kind}": count for (place, kind), count in sorted(self.waits.items())}

    def settle(self) -> None:
        """Waits until gloo's threads hold no tensor of a collective that has ended; they let go a moment later.

        Raises:
            TimeoutError: one was still held after five minutes.
        """
        deadline = time.monotonic() + 300
        while (held := [tensor for tensor in self.handed if tensor() is not None]) or self.memory.freeing():
            if time.monotonic() > deadline:
                raise TimeoutError(f"gloo still holds {len(held)} tensors after 300 s")
            time.sleep(0.001)
        self.handed.clear()

    def note(self, kind: str) -> None:
        if (place := _place()) != "stand-in":
            self.waits[place, kind] += 1
        self.arriving.clear()
        streams.HOST.wait_event(streams.current().record_event())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [x for x in tensors if x.is_cuda]
        on_host = [x for x in tensors if x.device.type == "cpu"]
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs, on_host)
        reads = not any(returned.alias_info for returned in func._schema.returns)  # a view reads nothing yet
        if self.arriving and reads and any(x.untyped_storage().data_ptr() in self.arriving for x in on_host):
            raise RuntimeError(f"{_place()}: {name} reads host memory before a copy from the device has arrived")
        if func._overloadname == "dtype_out":
            return _widened(name, *args, **kwargs)
        if name not in COPIES and on_device:
            self._compute(func, name, args, kwargs, on_host)
        if not any(returned.alias_info and not returned.alias_info.is_write for returned in func._schema.returns):
            self._order(func, name, args, kwargs)
        result = func(*args, **kwargs)
        self._made(result)
        if name == "lift_fresh" and result.is_cuda:  # torch.tensor(numbers, device="cuda") has copied them, unseen
            self.note("copy from the host")
        if name == "_pin_memory" or kwargs.get("pin_memory"):
            self.pinned.add(result.untyped_storage().data_ptr())
        if name in COPIES:
            self._copied(name, args, kwargs, result)
        return result

    def _order(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises RuntimeError if the operation may meet unfinished work of another stream."""
        self._raise_faults()
        streams.current().issued += 1
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value):
                on_device = isinstance(tensor, Tensor) and tensor.is_cuda
                if on_device and (race := self.memory.use(tensor.untyped_storage(), writes)):
                    raise RuntimeError(f"{_place()}: {name} reads {race}")

    def _made(self, result: Any) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                self.memory.add(tensor.untyped_storage())

    def _raise_faults(self) -> None:
        if self.memory.faults:
            raise RuntimeError(self.memory.faults.pop())

    def _copied(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if not source.numel() or source.device.type == target.type:
            return
        if source.is_cuda and not blocking:
            self.arriving.add(result.untyped_storage().data_ptr())
        elif blocking:
            self.note("copy to the host" if source.is_cuda else "copy from the host")
        elif source.numel() > 1 and source.untyped_storage().data_ptr() not in self.pinned:
            self.note("copy of pageable memory")

    def _compute(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], on_host: list[Tensor]
    ) -> None:
        if name in INDEXING:
            indices = [x for x in args[1] if x is not None]
            masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
            fills = name != "index" and len(masks) == len(indices) and not args[2].is_cuda and args[2].dim() == 0
            if masks and not fills:
                self.note("size")
            if any(not x.is_cuda for x in indices):
                self.note("copy from the host")
            on_host = [x for x in on_host if not any(x is y for y in indices)]
        if name in READS:
            self.note(READS[name])
        if str(func) == "aten.repeat_interleave.Tensor" and kwargs.get("output_size") is None:
            self.note("size")
        if wrong := [tuple(x.shape) for x in on_host if x.dim()]:
            raise MixedDevices(f"{_place()}: {func} got {wrong} on the host and other tensors on the device")

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_host: list[Tensor]) -> Any:
        if on_host and "barrier" not in str(func):
            shapes = [tuple(x.shape) for x in on_host]
            raise MixedDevices(f"{_place()}: {func} got {shapes} on the host, where NCCL is not")
        if "allgather_into_tensor_coalesced" in str(func):
            raise RuntimeError(f"{_place()}: gloo's gather of several at once damages the heap")
        pairs = {id(x): (ON_HOST(x), x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_cuda}
        self.handed += [weakref.ref(host) for host, _ in pairs.values()]
        args, kwargs = tree_map(lambda x: pairs[id(x)][0] if id(x) in pairs else x, (args, kwargs))
        back = {id(host): own for host, own in pairs.values()}
        return tree_map(lambda x: back.get(id(x), x), func(*args, **kwargs))


WATCH = Watch()  # open while a case runs


def _place() -> str:
    """Names the innermost function of megarl or Megatron that is running, such as `megarl/actor/engine.py _step`."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(STAND_IN):
            return "stand-in"
        for package, root in ROOTS.items():
            if path.is_relative_to(root):
                return f"{package}/{path.relative_to(root)} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _widened(name: str, *args: Any, out: Tensor) -> Tensor:
    """`mm` or `addmm` of 16-bit factors into float32, which torch has on CUDA alone; the conditions are ATen's."""
    *bias, a, b, dtype = args
    assert dtype == out.dtype == torch.float32
    assert a.dtype == b.dtype in (torch.bfloat16, torch.float16)
    assert all(x.dtype == dtype for x in bias)
    return getattr(torch, name)(*bias, a.float(), b.float(), out=out)
