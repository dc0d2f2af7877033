// Rounding to 4-bit integers and their packing, the same for CPU and CUDA.
#pragma once

#include <cstdint>

#include "api.h"
#include "float_bits.h"

namespace megarl {

constexpr int kPacked = 8;                 // codes in an int32
constexpr float kInt4Steps = 7.5f;         // half of the 15 steps between -8 and 7
constexpr uint32_t kZeroCode = 8;          // codes are q + 8
constexpr uint32_t kEmptyScale = 0x3c00u;  // bfloat16 2^-7, its epsilon: the scale of a group of zeros

// Bits of the bfloat16 nearest to x, ties to even.
MEGARL_HD uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Scale of a group whose largest magnitude is `largest`, as bits of a bfloat16.
MEGARL_HD uint16_t int4_scale(uint32_t largest) {
  const uint16_t scale = to_bfloat16(float_of(largest) / kInt4Steps);
  return scale ? scale : static_cast<uint16_t>(kEmptyScale);
}

// Code of x: round(x / scale) to the nearest, ties to even, held to -8..7, plus 8. NaN has the code of 0.
MEGARL_HD uint32_t int4_code(float x, float scale) {
  const float quotient = x / scale;
  const uint32_t a = magnitude(quotient);
  if (a > 0x7f800000u) return kZeroCode;
  if (a >= 0x41000000u) return bits_of(quotient) >> 31 ? 0u : 15u;  // 8 and above
  // The sum has the rounded quotient in its last bits.
  const uint32_t code = bits_of(quotient + 12582920.0f) - 0x4b400000u;  // 1.5 * 2^23 + 8
  return code > 15u ? 15u : code;
}

}  // namespace megarl
