// Scales and rounding of E4M3, the same for CPU and CUDA. Integers round: no compiler can fuse or reorder
// them.
#pragma once

#include <cstdint>

#include "api.h"
#include "float_bits.h"

namespace megarl {

constexpr float kLargestE4M3 = 448.0f;

// Scale of a block whose largest magnitude is `largest`.
MEGARL_HD float scale_of(uint32_t largest, float least) {
  const float most = float_of(largest);
  return (most < least ? least : most) / kLargestE4M3;
}

// Bits of the E4M3 number nearest to x, ties to even. Numbers above 448 become 448, NaN stays NaN.
MEGARL_HD uint8_t to_e4m3(float x) {
  const uint32_t bits = bits_of(x), a = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 24 & 0x80u;
  if (a > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (a >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448
  uint32_t kept, dropped, half;
  if (a >= 0x3c800000u) {  // 2^-6, the least normal number: 3 bits of the fraction stay
    kept = (a >> 20) - (120u << 3);
    dropped = a & 0xfffffu;
    half = 0x80000u;
  } else {  // multiples of 2^-9
    const uint32_t shift = 141u - (a >> 23);
    if (shift > 24u) return static_cast<uint8_t>(sign);
    const uint32_t fraction = (a & 0x7fffffu) | 0x800000u;
    kept = fraction >> shift;
    dropped = fraction & ((1u << shift) - 1u);
    half = 1u << (shift - 1u);
  }
  const uint32_t up = dropped > half || (dropped == half && (kept & 1u));
  return static_cast<uint8_t>(sign | (kept + up));
}

// One block of a matrix, as a grid of blocks numbers them row by row.
struct Fp8Block {
  MEGARL_HD Fp8Block(const QuantizeFp8Args& a, int64_t index) {
    const int64_t across = (a.columns + a.block_columns - 1) / a.block_columns;
    row = index / across * a.block_rows;
    column = index % across * a.block_columns;
    rows = a.rows - row < a.block_rows ? a.rows - row : a.block_rows;
    columns = a.columns - column < a.block_columns ? a.columns - column : a.block_columns;
  }

  int64_t row, column, rows, columns;  // its first element, and its size
};

MEGARL_HD int64_t fp8_blocks(const QuantizeFp8Args& a) {
  return (a.rows + a.block_rows - 1) / a.block_rows * ((a.columns + a.block_columns - 1) / a.block_columns);
}

}  // namespace megarl
