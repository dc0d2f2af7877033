"""Rollouts in block FP8 on real SGLang servers: what a sync leaves there is what a fresh load puts there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from weights_support import TOLERANCE, Served, checksums, weights_of

from megarl.families.block_fp8 import BLOCK, SCALE, in_fp8
from megarl.reshard.quantised_weights import QuantisedWeights, quantised
from megarl.reshard.sync.coordinator import WeightSyncError
from megarl.reshard.transfer.store import Deadline
from megarl.rollout.servers.sglang_server import SGLangServers
from tests import rows
from tests.sglang.tiny_models import make_wide, save_quantised, save_tokenizer


def dequantised(model: nn.Module) -> nn.Module:
    """The model that a quantised server computes, with the same weights in float32."""
    tensors = dict(quantised(weights_of(model).tensors.items()))
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if in_fp8(name):
                scales = tensors[name + SCALE].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
                parameter.copy_(tensors[name].float() * scales)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    make_wide(0).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=rows.every(2, [1, 2]), ids=lambda tp_size: f"tp{tp_size}")
def servers(
    request: pytest.FixtureRequest, serve: Callable[..., SGLangServers], checkpoint: Path
) -> Iterator[SGLangServers]:
    servers = serve(checkpoint, tp_size=request.param, quantization="fp8")
    yield servers
    servers.stop()


@pytest.fixture
def served(servers: SGLangServers) -> Iterator[Served]:
    served = Served(servers, bucket_bytes=65536, delta=True)
    yield served
    served.session.close()


def test_a_quantised_server_computes_with_the_blocks_it_was_sent(served: Served) -> None:
    tp_size = served.servers.config.tp_size
    model = make_wide(1)
    source = QuantisedWeights(weights_of(model))
    report = served.push(source)
    assert report.verified > 0
    weights = weights_of(model).tensors
    wide = sum(t.nbytes for name, t in weights.items() if in_fp8(name))
    rest = sum(t.nbytes for name, t in weights.items() if not in_fp8(name) and "embed" not in name)
    embedding = weights["model.embed_tokens.weight"].nbytes
    narrow = wide // 4 + wide // 4 // BLOCK**2 * 4  # 8 bits for 32, and the scales
    assert report.bytes == narrow + rest * tp_size + embedding
    assert served.difference(dequantised(model)) < TOLERANCE
    assert served.difference(model) > 10 * TOLERANCE
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if n.endswith("o_proj.weight"))[3, 5] += 0.01
    changed = served.push(source)
    assert 0 < changed.bytes < 100
    assert served.difference(dequantised(model)) < TOLERANCE


def test_a_trainer_that_does_not_quantise_is_refused(served: Served) -> None:
    with pytest.raises(WeightSyncError, match="_scale_inv is held by the servers and by no trainer rank"):
        served.push(weights_of(make_wide(1)))


@pytest.mark.long
def test_a_sync_leaves_what_a_fresh_load_of_the_quantised_checkpoint_leaves(
    served: Served, serve: Callable[..., SGLangServers], tmp_path: Path
) -> None:
    """By SGLang's own checksums, which are of products. `test_sglang_geometry.py` compares the bytes."""
    model = make_wide(2)
    served.push(QuantisedWeights(weights_of(model)))
    fresh = serve(save_quantised(model, tmp_path), tp_size=served.servers.config.tp_size)
    held, loaded = (checksums(other.control(), Deadline(120)) for other in (served, Served(fresh)))
    fresh.stop()
    assert held == loaded
