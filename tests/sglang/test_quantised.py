"""Quantised rollouts on real SGLang servers: what a sync leaves there is what a fresh load puts there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import unpack_from_int32
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward
from weights_support import TOLERANCE, Served, checksums, weights_of

from megarl.families.weight_formats import FORMATS, WHOLE, ServedFormat
from megarl.reshard.quantised_weights import QuantisedWeights, quantised, shares_rows
from megarl.reshard.sync.coordinator import WeightSyncError
from megarl.reshard.sync.live_parameters import UNTOUCHED
from megarl.reshard.transfer.store import Deadline
from megarl.rollout.servers.sglang_server import SGLangServers
from tests import rows
from tests.sglang.tiny_models import make_wide, save_quantised, save_tokenizer

pytestmark = rows.marks()


def dequantised(model: nn.Module, format: ServedFormat) -> nn.Module:
    """The model that a quantised server computes, with the same weights in float32."""
    tensors = dict(quantised(weights_of(model).tensors.items(), format))
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if format.quantises(name):
                values, scales = (tensors[piece] for piece in format.names(name))
                if format.name == "int4":
                    values = unpack_from_int32(values, 4, parameter.shape)
                for dim, block in enumerate(format.scales.block):
                    scales = scales.repeat_interleave(parameter.shape[dim] if block == WHOLE else block, dim)
                parameter.copy_(values.float() * scales.float())
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    make_wide(0).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


SERVERS = [("fp8", 1), ("fp8", 2), ("fp8_channel", 2), ("int4", 2), ("int4", 1), ("fp8_channel", 1)]


@pytest.fixture(scope="module", params=rows.every(6, SERVERS), ids=lambda server: f"{server[0]}-tp{server[1]}")
def servers(
    request: pytest.FixtureRequest, serve: Callable[..., SGLangServers], checkpoint: Path
) -> Iterator[SGLangServers]:
    quantization, tp_size = request.param
    servers = serve(checkpoint, tp_size=tp_size, quantization=quantization)
    yield servers
    servers.stop()


@pytest.fixture
def served(servers: SGLangServers) -> Iterator[Served]:
    served = Served(servers, bucket_bytes=65536, delta=True)
    yield served
    served.session.close()


def format_of(served: Served) -> ServedFormat:
    return FORMATS[served.servers.config.quantization]


def test_a_quantised_server_computes_with_the_values_it_was_sent(served: Served) -> None:
    tp_size, format = served.servers.config.tp_size, format_of(served)
    model = make_wide(1)
    source = QuantisedWeights(weights_of(model), format)
    report = served.push(source)
    assert report.verified > 0
    weights = weights_of(model).tensors
    narrow, rest = 0, 0
    for name, tensor in weights.items():
        if format.quantises(name):  # a few bits for 32, and the scales, on each rank that has some of their rows
            rows, columns = format.scales.shape(*tensor.shape)
            ranks = tp_size if format.scales.of_whole_rows and shares_rows(name) else 1
            bits = 4 if format.name == "int4" else 8
            narrow += tensor.numel() * bits // 8 + 4 * rows * columns * ranks  # the server's other dtype is float32
        else:
            rest += tensor.nbytes * (1 if "embed" in name else tp_size)
    assert report.bytes == narrow + rest
    assert served.difference(dequantised(model, format)) < TOLERANCE
    assert served.difference(model) > 10 * TOLERANCE
    with torch.no_grad():
        weight = next(p for n, p in model.named_parameters() if n.endswith("o_proj.weight"))
        weight[3, 5] += 0.05 if format.name == "int4" else 0.01  # more than a step
    changed = served.push(source)
    assert 0 < changed.bytes < 400
    assert served.difference(dequantised(model, format)) < TOLERANCE


def test_a_trainer_that_does_not_quantise_is_refused(served: Served) -> None:
    with pytest.raises(WeightSyncError, match=r"(_scale\w*|_packed) is held by the servers and by no trainer rank"):
        served.push(weights_of(make_wide(1)))


def compared(ranks: list[dict[str, str]]) -> list[dict[str, str]]:
    """The checksums without those of the tensors that no sync sends."""
    return [{name: checksum for name, checksum in rank.items() if not name.endswith(UNTOUCHED)} for rank in ranks]


@pytest.mark.long
def test_a_sync_leaves_what_a_fresh_load_of_the_quantised_checkpoint_leaves(
    served: Served, serve: Callable[..., SGLangServers], tmp_path: Path
) -> None:
    """By SGLang's own checksums, which are of products. `test_sglang_geometry.py` compares the bytes."""
    model = make_wide(2)
    format = format_of(served)
    served.push(QuantisedWeights(weights_of(model), format))
    fresh = serve(save_quantised(model, tmp_path, format), tp_size=served.servers.config.tp_size)
    held, loaded = (compared(checksums(other.control(), Deadline(300))) for other in (served, Served(fresh)))
    fresh.stop()
    assert held == loaded


def test_a_cache_in_8_bits_rounds_keys_and_values(serve: Callable[..., SGLangServers], checkpoint: Path) -> None:
    """Against transformers with an attention that rounds them."""
    servers = serve(checkpoint, kv_cache_dtype="fp8_e4m3")

    def rounding(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        key, value = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
        return eager_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("rounding", rounding)
    AttentionMaskInterface.register("rounding", eager_mask)
    served = Served(servers)
    model = make_wide(0)
    assert served.difference(model) > 100 * TOLERANCE
    model.set_attn_implementation("rounding")
    assert served.difference(model) < 10 * TOLERANCE
    served.session.close()
    servers.stop()
