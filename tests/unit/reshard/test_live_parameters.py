"""Live parameters that differ from the rules of SGLang's layout are refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_configs import HIDDEN, config_of
from torch import Tensor, nn

from megarl.reshard.plan.sglang_layout import Geometry
from megarl.reshard.sync.live_parameters import LayoutError, check_plain, live_fragments


def live_parameters(**changes: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """Parameters of one rank of a plain Llama; `changes` replace a module's parameter, None leaves it out."""
    for p in Geometry.of(config_of("llama"), 0, 1).parameters():
        module = p.name.split(".")[-2]
        tensor = changes.get(module, torch.zeros(p.shape))
        if tensor is not None:
            yield p.name, tensor


def test_a_parameter_of_an_unexpected_shape_is_refused_with_both_shapes() -> None:
    wrong = live_parameters(gate_up_proj=torch.zeros(98, HIDDEN))
    with pytest.raises(LayoutError, match=r"gate_up_proj.weight as \[98, 32\] on rank 0 of 1, .* say \[96, 32\]") as e:
        list(live_fragments(wrong, Geometry.of(config_of("llama"), 0, 1)))
    assert e.value.tensor == "model.layers.0.mlp.gate_up_proj.weight"


def test_a_parameter_that_the_rules_expect_and_the_server_lacks_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"holds no lm_head.weight on rank 0 of 1, .* say \[384, 32\]"):
        list(live_fragments(live_parameters(lm_head=None), Geometry.of(config_of("llama"), 0, 1)))


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.w13_weight", "visual.proj.weight", "lm_head.bias"])
def test_a_parameter_without_a_rule_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match=r"\[4, 4\] on rank 0 of 1, and no rule for llama names it"):
        list(live_fragments([(name, torch.zeros(4, 4))], Geometry.of(config_of("llama"), 0, 1)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"use_intel_amx_backend": True}, "packed for AMX"),
        ({"quant_method": SimpleNamespace(w13_swiglu_interleaved=True)}, "interleaved; unset SGLANG_OPT_FUSE"),
        ({"quant_method": SimpleNamespace(load_up_proj_weight_first=True)}, "up before gate; use --moe-runner-backend"),
        ({"use_triton_kernels": True}, "transposed"),
        ({"quant_method": SimpleNamespace(quant_config=object())}, "serves experts quantized"),
    ],
)
def test_weights_that_sglang_rearranged_after_loading_are_refused(flags: dict[str, Any], message: str) -> None:
    model = nn.Module()
    model.experts = nn.Module()
    check_plain(model)
    for name, value in flags.items():
        setattr(model.experts, name, value)
    with pytest.raises(LayoutError, match=message):
        check_plain(model)
