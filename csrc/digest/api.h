// XXH3-128 of each 64 KiB of a tensor's bytes, so that thousands of GPU threads hash one tensor. The CPU's
// side is the library xxhash (megarl/ops/digest.py).
#pragma once

#include <cstdint>

namespace megarl {

constexpr int64_t kLeafBytes = 65536;

// bytes [size], aligned to 16. leaves uint8 [ceil(size / kLeafBytes), 16], as the library writes a hash:
// big-endian, the high half first. The last leaf is padded with zeros.
struct LeafDigestsArgs {
  const uint8_t* bytes;
  int64_t size;
  uint8_t* leaves;
};

void leaf_digests_cuda(const LeafDigestsArgs& args, void* stream);

}  // namespace megarl
