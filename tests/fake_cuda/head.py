"""The LM head at the size of a large model, on tensors without values: memory, operations and the chunks chosen.

`FakeTensorMode` carries shapes, dtypes and storages through the code that a GPU runs, forward and backward. Every
storage that an operation makes is counted while it lives. Not covered: the allocator's rounding and the workspaces of
cuBLAS, which a GPU adds.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.ops.divergence import FullTeacher, Student, TopKTeacher, linear_divergence
from megarl.ops.known_gradients import logprobs_of_token_loss
from megarl.ops.logprob import linear_logprobs, linear_token_loss, vocab_parallel_logprobs

TOKENS, VOCAB, HIDDEN = 16384, 151936, 4096


class Peak(TorchDispatchMode):
    """Counts bytes of storages that operations make, calls by operation, and operations of matrix products."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.sizes = {x.untyped_storage()._cdata: 0 for x in inputs}
        self.live = self.most = 0
        self.operations: Counter[str] = Counter()
        self.flops = 0  # of matrix products

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        self.operations[name] += 1
        if name in ("mm", "addmm", "addmm_"):
            left, right = [x for x in args if isinstance(x, Tensor)][-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.live += storage.nbytes()
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


def _token_loss(x: Tensor, w: Tensor, labels: Tensor, **keys: Any) -> Tensor:
    return linear_token_loss(x, w, labels, lambda logprobs, *_: logprobs, vocab_valid=w.shape[0], **keys)[0]


def _told(x: Tensor, w: Tensor, labels: Tensor, **keys: Any) -> Tensor:
    def gradients(logprobs: Tensor, entropy: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(logprobs), torch.zeros_like(entropy)

    keys |= {"rows": torch.arange(labels.numel(), device="cuda"), "vocab_valid": w.shape[0]}
    return logprobs_of_token_loss(x, w.detach(), labels, gradients, **keys)[0].sum()


def _told_frozen(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    keys = {"rows": torch.arange(labels.numel(), device="cuda"), "vocab_valid": w.shape[0], "with_entropy": False}
    return logprobs_of_token_loss(x, w.detach(), labels, lambda x, *_: (torch.ones_like(x),), **keys)[0].sum()


def _logprobs(x: Tensor, w: Tensor, labels: Tensor, **keys: Any) -> Tensor:
    return linear_logprobs(x, w, labels, vocab_valid=w.shape[0], **keys)[0].sum()


def _all_logits(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return vocab_parallel_logprobs(x @ w.t(), labels, vocab_valid=w.shape[0], inplace_backward=True)[0].sum()


def _divergence(x: Tensor, w: Tensor, labels: Tensor, beta: float, k: int = 0) -> Tensor:
    """From a teacher as large as the student, or from its `k` most likely tokens."""
    rows, vocab = torch.arange(labels.numel(), device="cuda"), w.shape[0]
    if k:
        ids = torch.empty(rows.numel(), k, dtype=torch.int64, device="cuda")
        teacher: FullTeacher | TopKTeacher = TopKTeacher(ids, ids.float())
    else:
        teacher = FullTeacher(x.detach(), w.detach(), vocab)
    student = Student(labels, rows, vocab, 0, None, x.dtype, _main_grad())
    return linear_divergence(x, w.detach(), student, teacher, beta=beta)[2].sum()


ROUTES: dict[str, Callable[..., Tensor]] = {
    "token loss": _token_loss,
    "token loss, sums in float32": lambda *inputs: _token_loss(*inputs, weight_grad_dtype=torch.float32),
    "token loss, main gradient": lambda *inputs: _token_loss(*inputs, main_grad=_main_grad(), loss_grad=1.0),
    "told gradients, main gradient": lambda *inputs: _told(*inputs, main_grad=_main_grad()),
    "told gradients, frozen head": _told_frozen,
    "log-probs, frozen head": lambda x, w, labels: _logprobs(x, w.detach(), labels),
    "log-probs": _logprobs,
    "log-probs, main gradient": lambda *inputs: _logprobs(*inputs, main_grad=_main_grad()),
    "all logits": _all_logits,
    "divergence, main gradient": lambda *inputs: _divergence(*inputs, beta=1.0),
    "divergence of a mean, main gradient": lambda *inputs: _divergence(*inputs, beta=0.5),
    "divergence of the top k, main gradient": lambda *inputs: _divergence(*inputs, beta=1.0, k=64),
}


def _main_grad() -> Tensor:
    return torch.empty(VOCAB, HIDDEN, device="cuda")


def head(route: str, tokens: int = TOKENS) -> dict[str, Any]:
    """Peak memory above inputs and gradients as a share of the logits, and the operations, of one route."""
    with FakeTensorMode():
        keys = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
        x, w = torch.empty(tokens, HIDDEN, **keys), torch.empty(VOCAB, HIDDEN, **keys)
        labels = torch.empty(tokens, dtype=torch.int64, device="cuda")
        returned = 0 if "frozen" in route else w.nbytes
        gradients = x.nbytes + (_main_grad().nbytes if "main gradient" in route else returned)
        with Peak([x, w, labels]) as peak:
            ROUTES[route](x, w, labels).backward()
        assert x.grad is not None
        assert (w.grad is None) == any(word in route for word in ("main gradient", "frozen"))
    return {
        "share": (peak.most - gradients) / (tokens * VOCAB * 2),
        "products": peak.flops / (2 * tokens * VOCAB * HIDDEN),
        "operations": dict(peak.operations),
    }
