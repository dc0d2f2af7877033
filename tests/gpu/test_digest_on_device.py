"""The digest of a tensor is the same on every device, and is the library's."""

from __future__ import annotations

import pytest
import torch
import xxhash
from devices import CudaDevice, EmulatedDevice
from torch import Tensor

from megarl.ops.digest import LEAF_BYTES, Parts, digest, digests_of, leaves_on_cpu, leaves_on_gpu

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


def places_of(spans: list[tuple[int, int]]) -> Tensor:
    return (
        torch.tensor([(leaf, end) for begin, end in spans for leaf in range(begin, end, LEAF_BYTES)]).t().contiguous()
    )


def test_all_parts_of_a_buffer_are_hashed_at_once_wherever_they_begin(device: CudaDevice | EmulatedDevice) -> None:
    """Parts of every alignment, some ending within 16 bytes, one of several leaves, one at the buffer's end."""
    buffer = random_bytes(3 * LEAF_BYTES + 4096)
    spans = [(1024 + 96 * i + i, 1024 + 96 * i + i + size) for i, size in enumerate((80, 1, 2, 15, 16, 17, 31, 64) * 2)]
    spans += [(2819, 2819 + LEAF_BYTES + 33), (len(buffer) - 21, len(buffer))]
    (leaves,) = device.run(leaves_on_gpu, buffer, places_of(spans))
    assert bytes(leaves.numpy()) == b"".join(leaves_on_cpu(buffer[begin:end].clone()) for begin, end in spans)


def test_digests_of_many_buffers_are_those_of_their_parts() -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(40, 9, generator=generator).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    tensors += [torch.zeros(0, 4), torch.randn(LEAF_BYTES // 4 + 3, generator=generator)]
    offsets, buffer = [], torch.zeros(LEAF_BYTES + 8192, dtype=torch.uint8)
    for number, tensor in enumerate(tensors):
        offsets.append(2000 * number)
        buffer[2000 * number : 2000 * number + tensor.nbytes] = tensor.flatten().view(torch.uint8)
    parts, expected = Parts(offsets, tensors), [digest(tensor) for tensor in tensors]
    found = digests_of({1: (parts, parts.leaves(buffer)), 3: (parts, parts.leaves(buffer))})
    assert found == {1: expected, 3: expected}
    assert digests_of({}) == {}


def test_a_tensor_without_elements_has_no_leaves_and_its_shape_counts() -> None:
    assert digest(torch.empty(0, 3)) != digest(torch.empty(3, 0))
    assert digest(torch.zeros(4)) != digest(torch.zeros(2, 2)) != digest(torch.zeros(2, 2, dtype=torch.bfloat16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_have_the_digests_of_their_copies_on_the_host() -> None:
    whole = torch.randn(1000, 1001, generator=torch.Generator().manual_seed(0)).bfloat16()
    for tensor in (whole, whole[3:], whole[:, 5:90], whole.T, whole[0, 1:2]):
        assert digest(tensor.cuda()) == digest(tensor)
