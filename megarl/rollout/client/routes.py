"""Routes: the experts that a server chose for each token, as answers of SGLang hold them."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.families.blocks import Decoder
from megarl.knobs import UserError


@dataclass(frozen=True)
class RouteShape:
    """Shape of a server's routes. It returns all layers, and only sparse ones are kept."""

    layers: int
    sparse: tuple[int, ...]  # indices of the layers with experts
    topk: int
    experts: int

    @staticmethod
    def of(model: Decoder) -> RouteShape:
        """Reads the shape of a model's routes.

        Raises:
            UserError: the model is dense.
        """
        if model.experts is None:
            raise UserError("algorithm.routing_replay replays a choice of experts, and this model is dense; set it off")
        sparse = tuple(index for index, is_sparse in enumerate(model.sparse) if is_sparse)
        return RouteShape(len(model.layers), sparse, model.experts.topk, model.experts.count)

    def parse(self, encoded: object, tokens: int) -> Tensor:
        """Decodes the routes of a sequence of `tokens` tokens, int16 `[tokens - 1, sparse layers, topk]`.

        The last token has none: no model has read it. SGLang sends base64 of int32 `[tokens - 1, layers, topk]`.

        Raises:
            ValueError: there are none, too few or too many, or an expert that the model does not have.
        """
        if not isinstance(encoded, str):
            raise ValueError(
                f"no routed_experts for a sequence of {tokens} tokens: start the server with "
                "--enable-return-routed-experts, or set algorithm.routing_replay=off"
            )
        try:
            data = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise ValueError(f"routed_experts are not base64: {error}") from error
        rows = max(tokens - 1, 0)
        if len(data) != 4 * rows * self.layers * self.topk:
            raise ValueError(
                f"routed_experts have {len(data)} bytes, and {rows} tokens x {self.layers} layers x {self.topk} "
                f"experts take {4 * rows * self.layers * self.topk}"
            )
        if not rows:
            return torch.empty(0, len(self.sparse), self.topk, dtype=torch.int16)
        routes = torch.frombuffer(bytearray(data), dtype=torch.int32).view(rows, self.layers, self.topk)
        routes = routes[:, list(self.sparse)]
        low, high = (int(x) for x in routes.aminmax())
        if low < 0 or high >= self.experts:
            raise ValueError(f"routed_experts name expert {low if low < 0 else high} of {self.experts}")
        ordered = routes.sort(-1).values
        if self.topk > 1 and bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            raise ValueError("routed_experts name an expert twice for a token; the server does not record them")
        return routes.to(torch.int16)


def continued(routes: Tensor | None, later: Tensor | None) -> Tensor | None:
    """Appends the rows of `later` that `routes` does not have. Both begin at the sequence's first token."""
    if routes is None or later is None:
        return routes if later is None else later
    return torch.cat((routes, later[len(routes) :]))
