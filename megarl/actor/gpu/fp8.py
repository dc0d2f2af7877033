"""8-bit matrix products of Transformer Engine (`actor.fp8`): recipes, and where they can run.

Linear layers quantise their inputs, weights and gradients in blocks; sums stay float32. Parameters, norms, attention,
the router and the LM head stay as they are, so weight sync and checkpoints do not change. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import PretrainedConfig

from megarl.actor.config import EngineConfig
from megarl.families import decoder
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig


@dataclass(frozen=True)
class Recipe:
    """A recipe of Transformer Engine 2.12, and its conditions (`quantization.py:62` and `:80`, `utils.py:439`)."""

    block: str  # elements that share a scale
    tokens: int  # divides a rank's tokens, so that blocks along tokens are full
    features: int  # divides the sizes of a weight on a rank
    least_gpu: tuple[int, int]  # compute capability
    below_gpu: tuple[int, int] | None = None
    least_cuda: tuple[int, int] = (12, 1)


RECIPES = {
    "blockwise": Recipe("1 x 128, of weights 128 x 128", 128, 16, (9, 0), least_cuda=(12, 9)),
    "mxfp8": Recipe("1 x 32", 32, 32, (10, 0), below_gpu=(12, 0)),
}
_GATHERED = 128  # divides the features of tensors that ranks gather in blocks (`utils.py:450`)
SCALES = {"off": 0.0, "blockwise": 4 / 128, "mxfp8": 1 / 32}  # bytes of scales for each quantised element


def token_multiple(fp8: str) -> int:
    """Multiple to which each rank's tokens of a microbatch are padded."""
    return RECIPES[fp8].tokens if fp8 in RECIPES else 1


def transformer_fields(fp8: str) -> dict[str, str]:
    """Fields of Megatron's TransformerConfig. Both recipes compute forward and backward in e4m3."""
    return {"fp8": "e4m3", "fp8_recipe": fp8} if fp8 in RECIPES else {}


def check_knobs(config: EngineConfig, deterministic: bool) -> None:
    """Refuses FP8 with layers that are not Transformer Engine's.

    Raises:
        UserError: naming the knob.
    """
    if config.fp8 == "off":
        return
    others = {
        "actor.shared_prefix=true": config.shared_prefix,
        "deterministic=true": deterministic,
        "actor.experts=sequential": config.experts == "sequential",
        f"actor.backend={config.backend}": config.backend not in ("auto", "te"),
    }
    for other, is_set in others.items():
        if is_set:
            raise UserError(
                f"actor.fp8={config.fp8} runs in Transformer Engine's layers and not with {other}; set actor.fp8=off "
                "or change that"
            )
    if config.dtype != "bfloat16":
        raise UserError(
            f"actor.fp8={config.fp8} quantises bfloat16 layers, and actor.dtype={config.dtype}; set actor.dtype="
            "bfloat16 or actor.fp8=off"
        )


def check_layout(config: EngineConfig, parallel: ParallelConfig, model: PretrainedConfig) -> None:
    """Refuses weights whose sizes on a rank are not multiples of the recipe's.

    Raises:
        UserError: naming the size, and the knobs.
    """
    if config.fp8 == "off":
        return
    recipe, tp, shape = RECIPES[config.fp8], parallel.tp_size, decoder(model)
    attention = shape.attention
    if config.fp8 == "blockwise" and parallel.sequence_parallel and shape.hidden % _GATHERED:
        raise UserError(
            f"actor.fp8=blockwise with parallel.sequence_parallel=true gathers features in blocks of {_GATHERED}, and "
            f"the model's hidden_size={shape.hidden}; set parallel.tp_size=1, or actor.fp8 to mxfp8 or off"
        )
    sizes = {
        "hidden_size": shape.hidden,
        "attention heads x head_dim": attention.q_size // tp,
        "query, key and value rows": (attention.q_size + 2 * attention.kv_size) // tp,
    }
    if (net := shape.delta_net) is not None:
        sections = net.sections(tp)
        sizes |= {"rows of a gated delta net": sum(sections), "values of a gated delta net": sections[3]}
    if shape.mlp is not None:
        sizes["intermediate_size"] = shape.mlp.width // tp
    if shape.experts is not None:
        sizes["rows of an expert"] = shape.experts.width // parallel.expert_tp_size
        if shape.experts.shared_width:
            sizes["rows of shared experts"] = shape.experts.shared_width // tp
    for name, size in sizes.items():
        if size % recipe.features:
            raise UserError(
                f"actor.fp8={config.fp8} multiplies weights whose sizes are multiples of {recipe.features}, and "
                f"parallel.tp_size={tp} leaves a rank {size} ({name}); choose another tp_size or actor.fp8=off"
            )


def check_gpu(config: EngineConfig, gpu: tuple[int, int] | None, cuda: tuple[int, int] | None) -> None:
    """Refuses a GPU or CUDA version that cannot run the recipe of `actor.fp8`.

    Transformer Engine itself refuses them only when a layer runs.

    Args:
        gpu: the lowest compute capability of this machine's GPUs; None without one.
        cuda: CUDA version of torch; None of a CPU build.

    Raises:
        UserError: naming both.
    """
    if config.fp8 == "off" or gpu is None:  # `check_device` refuses a machine without a GPU
        return
    recipe = RECIPES[config.fp8]
    if gpu < recipe.least_gpu or (recipe.below_gpu is not None and gpu >= recipe.below_gpu):
        bound = f" and below {_dotted(recipe.below_gpu)}" if recipe.below_gpu else ""
        raise UserError(
            f"actor.fp8={config.fp8} needs a GPU of compute capability {_dotted(recipe.least_gpu)} or above{bound}, "
            f"and one here has {_dotted(gpu)}; set actor.fp8=off"
        )
    if cuda is None or cuda < recipe.least_cuda:
        raise UserError(
            f"actor.fp8={config.fp8} needs CUDA {_dotted(recipe.least_cuda)} or above, and torch here has "
            f"{_dotted(cuda) if cuda else 'none'}; set actor.fp8=off or install requirements/gpu.txt"
        )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def copied_bytes(elements: int, fp8: str) -> int:
    """Bytes of the 8-bit copies that layers keep of their matrices in a step: along rows, and along columns."""
    return 0 if fp8 == "off" else math.ceil(2 * elements * (1 + SCALES[fp8]))
