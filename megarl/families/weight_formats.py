"""Formats of quantised weights on rollout servers: the tensors that stand for a weight, and their config's entry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BLOCK = 128  # rows and columns of a block of FP8
GROUP = 128  # columns of a group of 4-bit weights
PACKED = 8  # 4-bit weights in an int32
WEIGHT = ".weight"
SCALE = "_scale_inv"  # of blocks, after the weight's name
WHOLE = 0  # a block as long as the dimension
LINEAR = re.compile(
    r"(?:^|\.)(?:self_attn\.(?:[qkvo]_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj)"
    r"|mlp\.(?:experts\.\d+\.|shared_experts\.)?(?:gate|up|down)_proj"
    r"|block_sparse_moe\.experts\.\d+\.w[123]"
    r")\.weight$"
)
WHOLE_ROWS = "kv_a_proj_with_mqa.weight"  # every rank holds all rows of this weight
DENSE = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe")
LATENT = ("deepseek_v3", "kimi_k2", "glm4_moe_lite")


@dataclass(frozen=True)
class Piece:
    """A tensor that stands for a weight `[rows, columns]`, together with the format's others: values, or scales."""

    suffix: str  # in place of the weight's `.weight`
    dtype: str  # as torch names it
    block: tuple[int, int]  # rows and columns of the weight for each element; WHOLE: all of them
    widens: bool = False  # servers keep it in the dtype of their other weights

    @property
    def of_whole_rows(self) -> bool:
        """True if an element is of a whole row, which ranks may share."""
        return self.block[1] == WHOLE

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape for a weight of this size."""
        down, along = self.block
        return (1 if down == WHOLE else -(-rows // down), 1 if along == WHOLE else -(-columns // along))


@dataclass(frozen=True)
class ServedFormat:
    """A value of `server.quantization`: what stands for the weight of a linear layer."""

    name: str
    values: Piece
    scales: Piece
    config: Mapping[str, Any]  # the entry `quantization_config` of a checkpoint's config.json
    families: tuple[str, ...] = DENSE  # families whose layout on servers has rules for this format
    tile_rows: int = 1  # on GPUs, a linear layer's rows on a server rank are a multiple of this
    shape: str = ""  # suffix of a tensor with the weight's rows and columns, which checkpoints have beside the pieces

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.values, self.scales

    def quantises(self, name: str) -> bool:
        """True for the linear layers of attention, MLP and experts: no head, embedding or router."""
        return LINEAR.search(name) is not None

    def names(self, weight: str) -> tuple[str, ...]:
        """Names of the tensors that stand for a weight, in the order of `pieces`."""
        return tuple(weight.removesuffix(WEIGHT) + piece.suffix for piece in self.pieces)

    def piece_of(self, name: str) -> Piece | None:
        """The piece that a tensor of a quantised model is; None for one that stays as it is."""
        for piece in self.pieces:
            if name.endswith(piece.suffix) and self.quantises(name.removesuffix(piece.suffix) + WEIGHT):
                return piece
        return None

    def dtype_of(self, name: str, plain: str) -> str:
        """Dtype of a trainer's tensor; `plain` is that of weights which stay as they are."""
        piece = self.piece_of(name)
        return plain if piece is None else piece.dtype

    def served_dtype_of(self, name: str, plain: str) -> str:
        """Dtype of a server's tensor; `plain` is that of weights which stay as they are."""
        piece = self.piece_of(name)
        return plain if piece is None or piece.widens else piece.dtype

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight and its share of the scales, in large matrices."""
        shares = (0.0 if p.of_whole_rows else BYTES[p.dtype] / (p.block[0] * p.block[1]) for p in self.pieces)
        return sum(shares)


BYTES = {"float8_e4m3fn": 1, "float32": 4, "int32": 4, "bfloat16": 2}
FP8, FLOAT = "float8_e4m3fn", "float32"


def _compressed_tensors(layers: Mapping[str, Any], stored: str) -> dict[str, Any]:
    """The entry of a checkpoint in the format of compressed-tensors, whose linear layers are all alike."""
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **layers}},
        "ignore": ["lm_head"],
    }


FORMATS = {
    one.name: one
    for one in (
        ServedFormat(
            "fp8",
            Piece(WEIGHT, FP8, (1, 1)),
            Piece(WEIGHT + SCALE, FLOAT, (BLOCK, BLOCK)),
            {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": ["lm_head"],
            },
            DENSE + EXPERTS + LATENT,
        ),
        ServedFormat(
            "fp8_channel",
            Piece(WEIGHT, FP8, (1, 1)),
            Piece(".weight_scale", FLOAT, (1, WHOLE)),
            _compressed_tensors(
                {
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                    "input_activations": {
                        "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True,
                    },
                },
                "float-quantized",
            ),
        ),
        ServedFormat(
            "int4",
            Piece(".weight_packed", "int32", (1, PACKED)),
            Piece(".weight_scale", "bfloat16", (1, GROUP), widens=True),
            _compressed_tensors(
                {
                    "weights": {
                        "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True,
                    },
                },
                "pack-quantized",
            ),
            (*DENSE, "qwen3_moe", "mixtral"),  # SGLang 0.5.23 looks for a plain weight in GLM-4.5's shared experts
            tile_rows=64,  # of the Marlin kernel
            shape=".weight_shape",
        ),
    )
}  # fmt: skip
QUANTIZATIONS = ("none", *FORMATS)


def is_expert(name: str) -> bool:
    """True for the weights of routed experts, which ranks share out by sizes of their own."""
    return ".experts." in name


def format_of(config: Any) -> ServedFormat | None:
    """The format of a model with this config, if it is one of `FORMATS`."""
    entry = getattr(config, "quantization_config", None) or {}
    return next((one for one in FORMATS.values() if all(entry.get(k) == v for k, v in one.config.items())), None)
