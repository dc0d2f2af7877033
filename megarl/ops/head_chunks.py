"""Rows of logits that the LM head holds at a time, from a device's speed and memory.

A chunk of n rows is three matrix products of 2 n V H operations, and the row kernels over n V logits. The products are
the logits, the gradient of the hidden states and that of the weight. The weight's gradient `[V, H]` is read and written
once a chunk, so small chunks are bound by memory. `ChunkCost` counts operations and bytes. `gpu_chunk_rows` takes the
smallest chunk whose expected time is close to the best.

All ranks of a tensor parallel group must choose alike, as each chunk is a collective. So the choice depends on shapes
and on the GPU's model alone, not on the memory that is free.

Imports no torch, so `actor/sizes/memory.py` can estimate with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

ROW_UNIT = 128  # rows of a chunk are a multiple, as they are of a product's tiles
# Tiles of a product's output, which one SM computes at a time, with their share of the peak rate: assumed.
TILES = {(128, 256): 1.0, (128, 128): 0.85}
LEAST_ROWS = 1024  # a chunk may have, however few rows there are
SHARE_OF_ROWS = 0.1  # most logits in memory, of all
SHARE_OF_MEMORY = 1 / 32  # most logits in memory, of the GPU's
KEPT_SHARE_OF_MEMORY = 1 / 32  # most logits kept for backward, of the GPU's, where all ranks must decide alike
NEAR_BEST = 1.02  # expected time of the smallest chunk that is taken, over the best
DIVERGENCE_BYTES = {False: 2**24, True: 2**28}  # on a GPU or not: float32 logits of a chunk of `ops/divergence.py`
# Most copies of a chunk's logits in its backward pass (tests/fake_cuda counts them), of
TOP_K_COPIES = 5.2
END_COPIES = 8.2  # a full divergence with beta 0 or 1
MEAN_COPIES = 11.2  # with one between
CHUNK_S = 50e-6  # about a dozen launches of small kernels


@dataclass(frozen=True)
class GpuSpeed:
    """Peak rates of a GPU."""

    flops: float  # of 16-bit dense matrix products with float32 sums, per second
    bandwidth: float  # bytes of device memory per second
    sms: int

    @staticmethod
    def of(properties: Any) -> GpuSpeed:
        """Computes the rates from torch's device properties, whose clocks are in kHz and bus width in bits."""
        a_cycle = flops_per_cycle((properties.major, properties.minor))
        sms = properties.multi_processor_count
        transfers = 2e3 * properties.memory_clock_rate  # two a cycle
        return GpuSpeed(
            flops=sms * properties.clock_rate * 1e3 * a_cycle,
            bandwidth=transfers * properties.memory_bus_width / 8,
            sms=sms,
        )

    @property
    def balance(self) -> float:
        """Operations per byte at which computing takes as long as reading."""
        return self.flops / self.bandwidth


def flops_per_cycle(capability: tuple[int, int]) -> int:
    """Dense 16-bit operations of an SM's tensor cores per cycle, from NVIDIA's architecture papers."""
    if capability[0] == 10:  # B200, B300
        return 8192
    return {(8, 0): 2048, (9, 0): 4096}.get(capability, 1024)


@dataclass(frozen=True)
class ChunkCost:
    """Operations, bytes and expected time of the head's chunks, on one rank."""

    hidden: int
    vocab: int  # of this rank
    speed: GpuSpeed
    logit_bytes: int  # 2, or 4 with float32 logits
    grad_bytes: int  # of an element of the weight's gradient while it is summed

    def products(self, rows: int) -> dict[str, tuple[float, float, float]]:
        """Operations, bytes and reachable share of the peak rate, of each matrix product of a chunk."""
        flops = 2.0 * rows * self.vocab * self.hidden
        weight, chunk, logits = 2 * self.vocab * self.hidden, 2 * rows * self.hidden, rows * self.vocab
        sums = 2 * self.grad_bytes * self.vocab * self.hidden
        return {
            "logits": (flops, weight + chunk + self.logit_bytes * logits, self._busy(rows, self.vocab)),
            "hidden's gradient": (flops, weight + chunk + 2 * logits, self._busy(rows, self.hidden)),
            "weight's gradient": (flops, sums + chunk + 2 * logits, self._busy(self.vocab, self.hidden)),
        }

    def _busy(self, rows: int, columns: int) -> float:
        """Share of the peak rate for an output `[rows, columns]`: the last round of tiles leaves SMs idle."""

        def share(tile_rows: int, tile_columns: int) -> float:
            tiles = max(1, math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns))
            return tiles / (self.speed.sms * math.ceil(tiles / self.speed.sms))

        return max(peak * share(*tile) for tile, peak in TILES.items())

    def row_bytes(self, rows: int) -> int:
        """Bytes that the row kernels move: one pass forward, a read and a write backward, and the narrow copy."""
        narrow = self.logit_bytes + 2 if self.logit_bytes > 2 else 0
        return rows * self.vocab * (3 * self.logit_bytes + narrow)

    def seconds(self, rows: int) -> float:
        """Expected time of a chunk: products at the slower of computing and reading, row kernels at the bandwidth."""
        products = sum(
            max(flops / (self.speed.flops * busy), size / self.speed.bandwidth)
            for flops, size, busy in self.products(rows).values()
        )
        return products + self.row_bytes(rows) / self.speed.bandwidth + CHUNK_S

    def all_seconds(self, total: int, rows: int) -> float:
        """Expected time of `total` rows in chunks of `rows`."""
        full, rest = divmod(total, rows)
        return full * self.seconds(rows) + (self.seconds(rest) if rest else 0.0)

    def intensity(self, rows: int) -> float:
        """Operations per byte of the weight's gradient, the product that gains most from more rows."""
        flops, size, _ = self.products(rows)["weight's gradient"]
        return flops / size


def gpu_chunk_rows(total: int, cost: ChunkCost, memory: int) -> int:
    """Chooses the rows of a chunk, a multiple of 128 where there are more than 1,024.

    At most a tenth of all rows (1,024 where a tenth is less) and a 32nd of the GPU's `memory` bytes are in a chunk.
    """
    row_bytes = max(1, cost.vocab) * cost.logit_bytes
    most = min(most_gpu_chunk_rows(total), max(int(memory * SHARE_OF_MEMORY) // row_bytes, ROW_UNIT))
    if total <= most:
        return max(total, 1)
    seconds = {rows: cost.all_seconds(total, rows) for rows in range(ROW_UNIT, most + 1, ROW_UNIT)}
    bound = NEAR_BEST * min(seconds.values())
    return min(rows for rows, expected in seconds.items() if expected <= bound)


def most_gpu_chunk_rows(total: int) -> int:
    """Most rows of a chunk on any GPU."""
    return max(int(total * SHARE_OF_ROWS), LEAST_ROWS)


def cpu_chunk_rows(total: int) -> int:
    """A sixteenth of the rows, between 256 and 1,024."""
    return min(max(-(-total // 16), 256), 1024)


def divergence_chunk_rows(vocab: int, on_gpu: bool) -> int:
    """Rows of a divergence's chunk, by the size of a rank's vocabulary."""
    return max(16, DIVERGENCE_BYTES[on_gpu] // (4 * max(1, vocab)))


def divergence_bytes(vocab: int, *, on_gpu: bool, top_k: bool, beta: float) -> int:
    """Most memory of a divergence's chunk, by the size of a rank's vocabulary."""
    copies = TOP_K_COPIES if top_k else END_COPIES if beta in (0, 1) else MEAN_COPIES
    return math.ceil(divergence_chunk_rows(vocab, on_gpu) * vocab * 4 * copies)
