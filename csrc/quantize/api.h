// Weights as 8-bit floats (E4M3, OCP FP8) with a float32 scale for each block of rows and columns.
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

}  // namespace megarl
