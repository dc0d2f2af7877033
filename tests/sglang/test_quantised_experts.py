"""Experts in block FP8 on real SGLang servers: they compute with the weights that the trainer quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from weights_support import TOLERANCE, Served, SingleRankWeights

from megarl.families.weight_formats import BLOCK
from megarl.reshard.quantised_weights import QuantisedWeights
from megarl.rollout.servers.sglang_server import SGLangServers
from tests import rows
from tests.sglang.wide_models import BLOCKS, FIELDS, dequantised, model_of, save, wide_config, wide_weights

pytestmark = rows.marks()
CASES = {f"{family}-tp{tp_size}": (family, tp_size) for family in FIELDS for tp_size in (1, 2)}


@pytest.mark.parametrize("case", rows.only("deepseek_v3-tp2", CASES))
def test_a_quantised_server_computes_with_the_blocks_it_was_sent(
    case: str, serve: Callable[..., SGLangServers], tmp_path: Path
) -> None:
    family, tp_size = CASES[case]
    config = wide_config(family)
    start, weights = wide_weights(config, 0), wide_weights(config, 1)
    served = Served(
        serve(save(config, start, tmp_path / "start"), tp_size=tp_size, quantization="fp8"),
        bucket_bytes=65536,
        delta=True,
    )
    source = QuantisedWeights(SingleRankWeights(weights), BLOCKS)
    report = served.push(source)
    assert report.verified > 0
    wide = sum(tensor.numel() for name, tensor in weights.items() if BLOCKS.quantises(name))
    rest = sum(tensor.nbytes for name, tensor in weights.items() if not BLOCKS.quantises(name))
    assert wide * (1 + 4 / BLOCK**2) < report.bytes < wide * (1 + 8 / BLOCK**2) + rest * tp_size
    rounded = model_of(save(config, dequantised(weights), tmp_path / "rounded"))
    plain = model_of(save(config, weights, tmp_path / "plain"))
    assert served.difference(rounded) < TOLERANCE
    assert served.difference(plain) > 10 * TOLERANCE
    ends = (".experts.1.down_proj.weight", ".experts.1.w2.weight", "layers.0.self_attn.kv_b_proj.weight")
    for name in [name for name in weights if name.endswith(ends)]:
        weights[name][3, 5] += 0.05
    changed = served.push(source)
    assert 0 < changed.bytes < 300
    assert served.difference(model_of(save(config, dequantised(weights), tmp_path / "changed"))) < TOLERANCE
    served.session.close()
    served.servers.stop()
