#include "../common/parallel.h"
#include "e4m3.h"
#include "int4.h"

namespace megarl {
namespace {

template <class T>
void quantize_block(const QuantizeFp8Args& a, int64_t index) {
  const Fp8Block block(a, index);
  const T* input = static_cast<const T*>(a.input) + block.row * a.stride + block.column;
  uint8_t* values = a.values + block.row * a.columns + block.column;
  uint32_t largest = 0;
  for (int64_t r = 0; r < block.rows && !a.given; ++r)
    for (int64_t c = 0; c < block.columns; ++c) {
      const uint32_t m = magnitude(widened(input[r * a.stride + c]));
      largest = m > largest ? m : largest;
    }
  if (!a.given) a.scales[index] = scale_of(largest, a.least);
  const float inverse = 1.0f / a.scales[index];
  for (int64_t r = 0; r < block.rows; ++r)
    for (int64_t c = 0; c < block.columns; ++c)
      values[r * a.columns + c] = to_e4m3(widened(input[r * a.stride + c]) * inverse);
}

template <class T>
void quantize_group(const QuantizeInt4Args& a, int64_t index) {
  const int64_t across = a.columns / a.group;
  const int64_t row = index / across, column = index % across * a.group;
  const T* input = static_cast<const T*>(a.input) + row * a.stride + column;
  uint32_t* codes = a.codes + (row * a.columns + column) / kPacked;
  uint32_t largest = 0;
  for (int64_t c = 0; c < a.group; ++c) {
    const uint32_t m = magnitude(widened(input[c]));
    largest = m > largest ? m : largest;
  }
  const BFloat16 scale{int4_scale(largest)};
  a.scales[index] = scale.bits;
  for (int64_t c = 0; c < a.group; c += kPacked) {
    uint32_t packed = 0;
    for (int i = 0; i < kPacked; ++i) packed |= int4_code(widened(input[c + i]), widened(scale)) << 4 * i;
    codes[c / kPacked] = packed;
  }
}

}  // namespace

void quantize_fp8_cpu(const QuantizeFp8Args& a, int threads) {
  const bool wide = a.dtype == static_cast<int>(DType::kFloat32);
  const auto quantize = wide ? quantize_block<float> : quantize_block<BFloat16>;
  parallel_for(fp8_blocks(a), a.block_rows * a.block_columns, threads, [&](int64_t i) { quantize(a, i); });
}

void quantize_int4_cpu(const QuantizeInt4Args& a, int threads) {
  const bool wide = a.dtype == static_cast<int>(DType::kFloat32);
  const auto quantize = wide ? quantize_group<float> : quantize_group<BFloat16>;
  parallel_for(a.rows * (a.columns / a.group), a.group, threads, [&](int64_t i) { quantize(a, i); });
}

}  // namespace megarl
