"""The digest of a tensor is the same on every device, and is the library's."""

from __future__ import annotations

import pytest
import torch
import xxhash
from devices import CudaDevice, EmulatedDevice
from torch import Tensor

from megarl.ops.digest import LEAF_BYTES, digest, leaves_on_cpu, leaves_on_gpu

SIZES = (1, 15, 16, 17, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 3 * LEAF_BYTES + 1000)


def random_bytes(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_leaves_match_the_library(device: CudaDevice | EmulatedDevice, size: int) -> None:
    data = random_bytes(size)
    (leaves,) = device.run(leaves_on_gpu, data)
    padded = bytes(data.numpy()).ljust(-(-size // LEAF_BYTES) * LEAF_BYTES, b"\0")
    library = [xxhash.xxh3_128_digest(padded[i : i + LEAF_BYTES]) for i in range(0, len(padded), LEAF_BYTES)]
    assert bytes(leaves.numpy()) == b"".join(library) == leaves_on_cpu(data)


def test_every_byte_counts(device: CudaDevice | EmulatedDevice) -> None:
    """A flipped bit in each stripe position of a leaf, in its padded tail, and a swap of two words."""
    data = random_bytes(LEAF_BYTES + 96)
    (before,) = device.run(leaves_on_gpu, data)
    for at in (0, 63, 1024 * 3 + 8, LEAF_BYTES - 65, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 95):
        changed = data.clone()
        changed[at] ^= 1
        (after,) = device.run(leaves_on_gpu, changed)
        assert [not torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [
            at < LEAF_BYTES,
            at >= LEAF_BYTES,
        ]


def test_a_tensor_without_elements_has_no_leaves_and_its_shape_counts() -> None:
    assert digest(torch.empty(0, 3)) != digest(torch.empty(3, 0))
    assert digest(torch.zeros(4)) != digest(torch.zeros(2, 2)) != digest(torch.zeros(2, 2, dtype=torch.bfloat16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_have_the_digests_of_their_copies_on_the_host() -> None:
    whole = torch.randn(1000, 1001, generator=torch.Generator().manual_seed(0)).bfloat16()
    for tensor in (whole, whole[3:], whole[:, 5:90], whole.T, whole[0, 1:2]):
        assert digest(tensor.cuda()) == digest(tensor)
