"""One rank of SGLang, model classes only: has its routers choose, and reads what its capturer of experts recorded.

Usage: routes_worker.py PARENT_PID 0 1 1 PORT 0 CHECKPOINT...

For each checkpoint it prints a line of JSON. Routers and the capturer are SGLang's; experts and schedulers are left
out.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from geometry_worker import CHECKPOINTS, arguments, start
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.model_loader import get_model
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer, set_global_experts_capturer
from torch import Tensor

from megarl.families import decoder, load_config
from megarl.rollout.client.routes import RouteShape

PROMPT = 4  # tokens that two requests share; each has two more
SLOTS = ([7, 3, 9, 12, 5, 1], [7, 3, 9, 12, 20, 21])  # of each request's tokens in the cache of keys and values


class NoExperts(torch.nn.Module):
    def forward(self, hidden_states: Tensor, topk_output: Any) -> Tensor:
        return torch.zeros_like(hidden_states)


def blocks_of(model: Any) -> dict[int, Any]:
    """Blocks with a router, by the layer that they record, with their experts left out."""
    blocks = {}
    for layer in model.model.layers:
        if isinstance(getattr(layer.mlp, "topk", None), TopK):
            layer.mlp.experts = NoExperts()
            layer.mlp._forward_shared_experts = lambda *_, **__: None
            blocks[layer.mlp.topk.topk_config.layer_id] = layer.mlp
    return blocks


def choose(blocks: dict[int, Any], capturer: Any, hidden: Tensor, slots: list[int]) -> Tensor:
    """Runs the blocks, the last layer first, on `hidden [layers, tokens, features]`.

    Returns the experts with the largest logits, `[tokens, layers, topk]`.
    """
    expected = []
    for layer, block in sorted(blocks.items(), reverse=True):
        block(hidden[layer])
        router = block.router if hasattr(block, "router") else block.gate
        logits = torch.nn.functional.linear(hidden[layer], router.weight, getattr(router, "bias", None))
        expected.insert(0, logits.topk(capturer.topk_size).indices)
    batch = SimpleNamespace(out_cache_loc=torch.tensor(slots), out_cache_loc_virtual=None)
    capturer.on_forward_end(batch, can_run_graph=False, cuda_graph_batch=None)
    return torch.stack(expected, dim=1)


def recorded(checkpoint: str) -> dict[str, Any]:
    """Routes of two requests as megarl reads them, and the ones that their routers should have chosen."""
    model_config = ModelConfig.from_server_args(arguments(checkpoint))
    model_config = adjust_config_with_unaligned_cpu_tp(model_config, LoadConfig(), 1)  # delta nets on CPU want it
    model = get_model(model_config=model_config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    capturer = RoutedExpertsCapturer.create(
        model=model, model_config=model_config, num_tokens=32, max_running_requests=2, device="cpu"
    )
    set_global_experts_capturer(capturer)
    assert capturer is not None
    config, blocks = load_config(Path(checkpoint)), blocks_of(model)
    result: dict[str, Any] = {"checkpoint": Path(checkpoint).name, "recorded": sorted(blocks)}
    if sorted(blocks) != [i for i, sparse in enumerate(decoder(config).sparse) if sparse]:
        return result
    generator = torch.Generator().manual_seed(0)
    layers = len(decoder(config).layers)
    hidden = [torch.randn(layers, n, config.hidden_size, generator=generator) for n in (len(SLOTS[0]), 2)]
    with torch.no_grad():
        first = choose(blocks, capturer, hidden[0], SLOTS[0])
        second = choose(blocks, capturer, hidden[1], SLOTS[1][PROMPT:])  # its prompt is in the cache
    pool = SimpleNamespace(req_to_token=torch.tensor(SLOTS))
    tokens = len(SLOTS[0]) + 1  # no model has read the last one
    routes = [capturer.get_topk(request, tokens, pool) for request in range(len(SLOTS))]
    texts = DetokenizerManager._b64_encode_per_request(routes)
    assert texts is not None
    parsed = [RouteShape.of(decoder(config)).parse(text, tokens) for text in texts]
    return result | {
        "routes": [routes.sort(-1).values.tolist() for routes in parsed],
        "chosen": [x.sort(-1).values.tolist() for x in (first, torch.cat((first[:PROMPT], second)))],
    }


def main() -> None:
    logging.disable(logging.WARNING)
    start(arguments(CHECKPOINTS[0], enable_return_routed_experts=True))
    for checkpoint in CHECKPOINTS:
        print(json.dumps(recorded(checkpoint)), flush=True)


if __name__ == "__main__":
    main()
