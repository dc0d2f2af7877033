// Floats as integers, the same for CPU and CUDA: no compiler can fuse, reorder or approximate them.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/types.h"

namespace megarl {

MEGARL_HD uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

MEGARL_HD float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

MEGARL_HD float widened(float x) {
  return x;
}
MEGARL_HD float widened(BFloat16 x) {
  return float_of(static_cast<uint32_t>(x.bits) << 16);
}

// |x| as an integer: ordered like the numbers, NaN above infinity.
MEGARL_HD uint32_t magnitude(float x) {
  return bits_of(x) & 0x7fffffffu;
}

}  // namespace megarl
