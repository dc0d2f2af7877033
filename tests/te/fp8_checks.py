"""Transformer Engine's own verdicts on `actor.fp8`, as JSON on the standard output. Runs in the GPU environment.

Mocked are the properties of a GPU. Nothing is computed: recipes, quantisers and checks are Python.
"""

from __future__ import annotations

import json
from typing import Any

from tests.te.record import pretend_gpu

pretend_gpu()

import torch  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
import transformer_engine_torch as tex  # noqa: E402
from megatron.core.fp8_utils import get_fp8_recipe  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from transformer_engine.pytorch import quantization, utils  # noqa: E402
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer  # noqa: E402
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer  # noqa: E402

from megarl.actor.config import EngineConfig  # noqa: E402
from megarl.actor.gpu import fp8  # noqa: E402
from megarl.knobs import UserError  # noqa: E402

GPUS = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
SUPPORT = {"blockwise": "check_fp8_block_scaling_support", "mxfp8": "check_mxfp8_support"}


def runs(recipe: str, gpu: tuple[int, int]) -> tuple[bool, bool]:
    """True if Transformer Engine runs the recipe on the GPU, and if megarl does."""
    quantization.get_device_compute_capability = lambda: gpu
    theirs = getattr(quantization, SUPPORT[recipe]).__wrapped__()[0]
    cuda = tuple(int(part) for part in torch.version.cuda.split("."))
    try:
        fp8.check_gpu(EngineConfig(fp8=recipe), gpu, (cuda[0], cuda[1]))
    except UserError:
        return theirs, False
    return theirs, True


def multiples(recipe: str) -> dict[str, bool]:
    """Verdicts on a tensor of the least tokens and features that megarl lets through, and on half of each."""
    kind: Any = tex.DType.kFloat8E4M3
    quantizer = (
        Float8BlockQuantizer(kind, rowwise=True, columnwise=True, block_scaling_dim=1)
        if recipe == "blockwise"
        else MXFP8Quantizer(kind)
    )
    facts = fp8.RECIPES[recipe]
    whole = torch.empty(facts.tokens, facts.features if recipe == "mxfp8" else 128, device="meta")
    utils.assert_dim_for_fp8_exec(torch.empty(facts.tokens, facts.features, device="meta"))
    half = torch.empty(facts.tokens // 2, whole.shape[1], device="meta")
    return {"whole": quantizer.is_quantizable(whole), "half": quantizer.is_quantizable(half)}


def recipe_of(name: str) -> dict[str, Any]:
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, **fp8.transformer_fields(name))
    recipe = get_fp8_recipe(config)
    with te.fp8_autocast(enabled=False, fp8_recipe=recipe):
        pass
    return {
        "class": type(recipe).__name__,
        "format": recipe.fp8_format.name,
        "align": quantization.get_align_size_for_quantization(recipe),
        "parameters": config.fp8_param,
    }


if __name__ == "__main__":
    facts = {
        name: {
            "gpus": {f"{gpu[0]}.{gpu[1]}": runs(name, gpu) for gpu in GPUS},
            "multiples": multiples(name),
            "recipe": recipe_of(name),
        }
        for name in fp8.RECIPES
    }
    print(json.dumps(facts))
