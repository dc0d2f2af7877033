"""Noise of deterministic sampling on a CPU: MurmurHash3 of seed, position and column, against its definition."""

from __future__ import annotations

import struct

import torch

from megarl.ops.row_invariant import murmur_hash


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with the seed 0, of whole words (Appleby, smhasher)."""
    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 % 2**32
        word = (word << 15 | word >> 17) % 2**32 * 0x1B873593 % 2**32
        state ^= word
        state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


def test_the_noise_is_the_hash_of_seed_position_and_column() -> None:
    assert murmur3(b"test") == 0xBA6BD213  # a published value
    seeds, positions, columns = [0, 42, 2**63 - 1, 2**32 + 5], [0, 7, 4095, 2**20], [0, 1, 151_935]
    found = murmur_hash(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert found.tolist() == expected
