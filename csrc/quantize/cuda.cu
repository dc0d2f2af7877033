#include "../common/cuda.cuh"
#include "e4m3.h"
#include "int4.h"

namespace megarl {
namespace {

constexpr int kThreads = 256;

// One thread block per block of weights. The second reading of 128 x 128 weights comes from the cache.
template <class T>
__global__ void __launch_bounds__(kThreads) quantize_fp8_kernel(const QuantizeFp8Args a) {
  __shared__ float shared_scale;
  const Fp8Block block(a, blockIdx.x);
  const T* input = static_cast<const T*>(a.input) + block.row * a.stride + block.column;
  uint8_t* values = a.values + block.row * a.columns + block.column;
  const int64_t elements = block.rows * block.columns;
  unsigned largest = 0;
  for (int64_t i = threadIdx.x; i < elements && !a.given; i += kThreads) {
    const unsigned m = magnitude(widened(input[i / block.columns * a.stride + i % block.columns]));
    largest = m > largest ? m : largest;
  }
  largest = block_reduce<kThreads>(largest, [](unsigned l, unsigned r) { return l > r ? l : r; });
  if (threadIdx.x == 0) {
    if (!a.given) a.scales[blockIdx.x] = scale_of(largest, a.least);
    shared_scale = a.scales[blockIdx.x];
  }
  __syncthreads();
  const float inverse = 1.0f / shared_scale;
  for (int64_t i = threadIdx.x; i < elements; i += kThreads) {
    const int64_t r = i / block.columns, c = i % block.columns;
    values[r * a.columns + c] = to_e4m3(widened(input[r * a.stride + c]) * inverse);
  }
}

// One thread for 8 columns, which it holds in registers. The group / 8 neighbouring threads of a group, a
// power of 2 within a warp, find its largest magnitude by shuffles.
template <class T>
__global__ void __launch_bounds__(kThreads) quantize_int4_kernel(const QuantizeInt4Args a) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t first = index * kPacked;  // element of the matrix
  const bool inside = first < a.rows * a.columns;
  const int64_t row = first / a.columns, column = first % a.columns;
  const T* input = static_cast<const T*>(a.input) + row * a.stride + column;
  float x[kPacked];
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < kPacked; ++i) {
    x[i] = inside ? widened(input[i]) : 0.0f;
    const unsigned m = magnitude(x[i]);
    largest = m > largest ? m : largest;
  }
  for (int distance = static_cast<int>(a.group) / kPacked / 2; distance; distance /= 2) {
    const unsigned other = __shfl_xor_sync(kAllLanes, largest, distance);
    largest = other > largest ? other : largest;
  }
  if (!inside) return;
  const BFloat16 scale{int4_scale(largest)};
  if (column % a.group == 0) a.scales[first / a.group] = scale.bits;
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < kPacked; ++i) packed |= int4_code(x[i], widened(scale)) << 4 * i;
  a.codes[index] = packed;
}

}  // namespace

void quantize_fp8_cuda(const QuantizeFp8Args& a, void* stream) {
  const int64_t blocks = fp8_blocks(a);
  const auto on = static_cast<cudaStream_t>(stream);
  if (blocks && a.dtype == static_cast<int>(DType::kFloat32)) {
    quantize_fp8_kernel<float><<<blocks_for(blocks, 1), kThreads, 0, on>>>(a);
  } else if (blocks) {
    quantize_fp8_kernel<BFloat16><<<blocks_for(blocks, 1), kThreads, 0, on>>>(a);
  }
  check_launch("quantize_fp8");
}

void quantize_int4_cuda(const QuantizeInt4Args& a, void* stream) {
  const int64_t words = a.rows * a.columns / kPacked;
  const auto on = static_cast<cudaStream_t>(stream);
  if (words && a.dtype == static_cast<int>(DType::kFloat32)) {
    quantize_int4_kernel<float><<<blocks_for(words, kThreads), kThreads, 0, on>>>(a);
  } else if (words) {
    quantize_int4_kernel<BFloat16><<<blocks_for(words, kThreads), kThreads, 0, on>>>(a);
  }
  check_launch("quantize_int4");
}

}  // namespace megarl
