// Weights as 8-bit floats (E4M3, OCP FP8) with a float32 scale for each block of rows and columns, and as
// 4-bit integers with a bfloat16 scale for each group of columns of a row.
#pragma once

#include <cstdint>

namespace megarl {

// input [rows, columns] of `dtype`, rows `stride` elements apart. values uint8 [rows, columns], bits of E4M3.
// scales [ceil(rows / block_rows), ceil(columns / block_columns)]. Blocks at the edges may be smaller.
//
// A block's scale is max(largest |x|, least) / 448, or the one that `scales` holds already if it is `given`.
// Its values are x * (1 / scale), rounded to nearest even, all in float. A NaN makes its whole block NaN,
// unless the scale is given.
struct QuantizeFp8Args {
  const void* input;
  int dtype;
  int64_t rows, columns, stride;
  int64_t block_rows, block_columns;
  float least;
  bool given;
  uint8_t* values;
  float* scales;
};

void quantize_fp8_cpu(const QuantizeFp8Args& args, int threads);
void quantize_fp8_cuda(const QuantizeFp8Args& args, void* stream);

// input as above; `columns` is a multiple of `group`. codes int32 [rows, columns / 8], the first of 8 columns
// in the lowest 4 bits. scales [rows, columns / group], bits of bfloat16.
//
// A group's scale is max |x| / 7.5, rounded to bfloat16; 2^-7 if that is 0. A code is round(x / scale) + 8,
// ties to even, with the rounded number held to -8..7. A group with a NaN or an infinity has such a scale.
struct QuantizeInt4Args {
  const void* input;
  int dtype;
  int64_t rows, columns, stride;
  int64_t group;  // 32, 64, 128 or 256
  uint32_t* codes;
  uint16_t* scales;
};

void quantize_int4_cpu(const QuantizeInt4Args& args, int threads);
void quantize_int4_cuda(const QuantizeInt4Args& args, void* stream);

}  // namespace megarl
