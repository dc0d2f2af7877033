// XXH3-128 of each 64 KiB of a tensor's bytes, so that thousands of GPU threads hash one tensor, or all parts
// of a buffer. The CPU's side is the library xxhash (megarl/ops/digest.py).
#pragma once

#include <cstdint>

namespace megarl {

constexpr int64_t kLeafBytes = 65536;

// bytes [size], aligned to 16. leaves uint8 [count, 16], as the library writes a hash: big-endian, the high
// half first. Leaf i begins at byte begins[i], anywhere, and its part ends before byte ends[i]; without them
// the leaves are those of the whole tensor, count = ceil(size / kLeafBytes). A part's last leaf is padded
// with zeros.
struct LeafDigestsArgs {
  const uint8_t* bytes;
  int64_t size;
  const int64_t* begins;  // or null, with `ends`
  const int64_t* ends;
  int64_t count;
  uint8_t* leaves;
};

void leaf_digests_cuda(const LeafDigestsArgs& args, void* stream);

}  // namespace megarl
