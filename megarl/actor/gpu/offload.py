"""Moves a model's memory to the host and back, bit for bit, so that a server can use the GPU meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megarl.parallel import platform

PARTS = ("parameters", "gradients", "optimizer")
LEAST_PIECE = 2**20  # bytes


class Offloaded:
    """Device memory of tensors, freed until `restore`. Views of the tensors are valid again afterwards.

    Works on storages: each is freed once, however many tensors view it. With `keep=False` the content is dropped, and
    `restore` fills with zeros.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor], keep: bool = True) -> None:
        here = (tensor.untyped_storage() for tensor in tensors if tensor.device == platform.device())
        self._storages = [storage for storage in _by_pointer(here) if storage.nbytes()]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._hosts = [_to_host(storage) for storage in self._storages] if keep else []
        self.free()

    def free(self) -> None:
        """Frees the memory again after a `restore`, without a copy: the content must not have changed since."""
        if platform.has_gpu():
            torch.cuda.synchronize()  # copies are asynchronous, and kernels may still write
        for storage in self._storages:
            storage.resize_(0)
        if platform.has_gpu():
            torch.cuda.empty_cache()  # torch would keep the memory for itself

    @property
    def nbytes(self) -> int:
        """Freed bytes of the device."""
        return sum(self._sizes)

    @torch.no_grad()
    def restore(self) -> None:
        """Allocates the memory again and copies the content back."""
        for index, (storage, size) in enumerate(zip(self._storages, self._sizes, strict=True)):
            storage.resize_(size)
            if self._hosts:
                pieces = self._hosts[index]
                for part, piece in zip(_bytes_of(storage).split([len(p) for p in pieces]), pieces, strict=True):
                    part.copy_(piece, non_blocking=True)
            else:
                _bytes_of(storage).zero_()
        if platform.has_gpu():
            torch.cuda.synchronize()  # the pinned copies may be freed next


def _by_pointer(storages: Iterable[torch.UntypedStorage]) -> Iterator[torch.UntypedStorage]:
    """Yields each storage once: torch makes a new Python object at every call of `untyped_storage`."""
    seen: set[int] = set()
    for storage in storages:
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> list[Tensor]:
    """Copies a storage to pieces of pinned memory, which torch would round up to a power of two as a whole."""
    pieces = []
    for part in _bytes_of(storage).split(pinned_sizes(storage.nbytes())):
        piece = torch.empty(len(part), dtype=torch.uint8, pin_memory=platform.has_gpu())
        pieces.append(piece.copy_(part, non_blocking=True))
    return pieces


def pinned_sizes(nbytes: int) -> list[int]:
    """Splits `nbytes` into powers of two, and a rest below LEAST_PIECE."""
    sizes = []
    while nbytes >= LEAST_PIECE:
        sizes.append(1 << (nbytes.bit_length() - 1))
        nbytes -= sizes[-1]
    return [*sizes, nbytes] if nbytes else sizes


def drop_quantised_copies(modules: Iterable[torch.nn.Module]) -> None:
    """Frees the 8-bit copies that Transformer Engine's layers keep of their weights, about 2 bytes a parameter.

    The first microbatch of the next pass quantises the weights again.
    """
    for module in modules:
        for layer in module.modules():
            if isinstance(copies := getattr(layer, "_fp8_workspaces", None), dict):
                copies.clear()


class EngineMemory:
    """Parameters, gradients and optimizer state of a trained engine, each on the device or offloaded."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._offloaded: dict[str, Offloaded] = {}

    def offload(self, *parts: str) -> int:
        """Frees the device memory of `parts`, and returns its bytes; 0 for parts without any.

        Gradients are dropped: they are zero between two updates.
        """
        freed = 0
        if "parameters" in parts:
            drop_quantised_copies(self._engine.modules)
        for part in parts:
            if part not in self._offloaded:
                self._offloaded[part] = Offloaded(self._tensors(part), keep=part != "gradients")
                freed += self._offloaded[part].nbytes
        return freed

    def restore(self, *parts: str) -> None:
        """Brings back `parts`; does nothing for a part that is on the device."""
        for part in parts:
            if part in self._offloaded:
                self._offloaded.pop(part).restore()

    def _tensors(self, part: str) -> Iterator[Tensor]:
        if part == "parameters":
            for module in self._engine.modules:
                yield from module.parameters()
        elif part == "gradients":
            for ddp in self._engine.ddps:
                yield from (buffer.grad_data for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers))
        else:
            yield from self._optimizer_tensors()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Yields Adam's moments and the main parameters; of float32 models the latter are the parameters themselves."""
        parameters = {p.untyped_storage().data_ptr() for module in self._engine.modules for p in module.parameters()}
        for part in getattr(self._engine.optimizer, "chained_optimizers", [self._engine.optimizer]):
            if part.is_stub_optimizer:
                continue
            tensors = [param for group in part.optimizer.param_groups for param in group["params"]]
            tensors += [x for state in part.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
            yield from (tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in parameters)
