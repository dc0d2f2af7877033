"""Quantised experts on real SGLang servers: they compute with the weights that the trainer quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from weights_support import TOLERANCE, Served, SingleRankWeights

from megarl.families.weight_formats import FORMATS
from megarl.reshard.quantised_weights import QuantisedWeights
from megarl.rollout.servers.sglang_server import SGLangServers
from tests.sglang.wide_models import FIELDS, dequantised, model_of, save, wide_config, wide_weights

pytestmark = pytest.mark.long
CASES = {
    f"{name}-{family}-tp{tp_size}": (name, family, tp_size)
    for name in ("fp8", "int4")
    for family in FIELDS
    for tp_size in (1, 2)
    if family in ("moonlight", *FORMATS[name].families) and (name, family) != ("int4", "moonlight")
}


@pytest.mark.parametrize("case", CASES)
def test_a_quantised_server_computes_with_the_weights_it_was_sent(
    case: str, serve: Callable[..., SGLangServers], tmp_path: Path
) -> None:
    name, family, tp_size = CASES[case]
    format = FORMATS[name]
    config = wide_config(family)
    start, weights = wide_weights(config, 0), wide_weights(config, 1)
    served = Served(
        serve(save(config, start, tmp_path / "start"), tp_size=tp_size, quantization=name),
        bucket_bytes=65536,
        delta=True,
    )
    source = QuantisedWeights(SingleRankWeights(weights), format)
    report = served.push(source)
    assert report.verified > 0
    wide = sum(tensor.numel() for name, tensor in weights.items() if format.quantises(name))
    rest = sum(tensor.nbytes for name, tensor in weights.items() if not format.quantises(name))
    scale = 4 / (format.scales.block[0] * format.scales.block[1])  # bytes of a weight, as the server's dtype is float32
    value = 0.5 if name == "int4" else 1
    assert wide * (value + scale) <= report.bytes < wide * (value + 2 * scale) + rest * tp_size
    rounded = model_of(save(config, dequantised(weights, format), tmp_path / "rounded"))
    plain = model_of(save(config, weights, tmp_path / "plain"))
    assert served.difference(rounded) < TOLERANCE
    assert served.difference(plain) > 10 * TOLERANCE
    ends = (".experts.1.down_proj.weight", ".experts.1.w2.weight", "layers.0.self_attn.kv_b_proj.weight")
    for name in [name for name in weights if name.endswith(ends)]:
        weights[name][3, 5] += 0.05
    changed = served.push(source)
    assert 0 < changed.bytes < 300
    assert served.difference(model_of(save(config, dequantised(weights, format), tmp_path / "changed"))) < TOLERANCE
    served.session.close()
    served.servers.stop()
