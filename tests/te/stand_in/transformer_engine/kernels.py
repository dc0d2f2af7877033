"""Marks what is one kernel call in the real package, so that launches can be counted."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Operations that launch nothing on a GPU: views, and memory without values
FREE = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand",
    "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze",
    "view",
}  # fmt: skip
_open: list[Launches] = []


class Launches(TorchDispatchMode):
    """Counts operations while open: each of torch's, and each call marked by `kernel` once."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.inside = 0  # kernels of the stand-in around the present operation

    def __enter__(self) -> Launches:
        _open.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _open.remove(self)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.inside and name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def kernel(name: str) -> Iterator[None]:
    """Counts one call of the real package's kernel, and nothing that computes it here."""
    for mode in _open:
        mode.counts[name] += not mode.inside
    with uncounted():
        yield


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Counts nothing: what the real package does without a kernel."""
    for mode in _open:
        mode.inside += 1
    try:
        yield
    finally:
        for mode in _open:
            mode.inside -= 1
