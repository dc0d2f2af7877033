// Shared by the CUDA kernels: launch checks, conversions and reductions in a fixed order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "types.h"

namespace megarl {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string(op) + ": " + cudaGetErrorString(error));
}

inline unsigned blocks_for(int64_t n, int per_block) {
  return static_cast<unsigned>((n + per_block - 1) / per_block);
}

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(BFloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
__device__ __forceinline__ float to_float(Float16 x) {
  return __half2float(__ushort_as_half(x.bits));
}

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <>
__device__ __forceinline__ Float16 from_float<Float16>(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}

// 2^x within 2 units in the last place; 0 where the result would be subnormal.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns the value of the lane `delta` higher, copied word by word. V must be trivially copyable.
template <class V>
__device__ __forceinline__ V shuffle_down(const V& v, int delta) {
  constexpr int kWords = sizeof(V) / 4;
  static_assert(sizeof(V) % 4 == 0);
  V out;
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    reinterpret_cast<unsigned*>(&out)[i] =
        __shfl_down_sync(kAllLanes, reinterpret_cast<const unsigned*>(&v)[i], delta);
  return out;
}

// Combines the threads' values in thread order, as a tree whose shape depends only on kThreads. The result is
// valid in thread 0. combine(left, right) need not commute.
template <int kThreads, class V, class Combine>
__device__ __forceinline__ V block_reduce(V v, const Combine& combine) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp);
  __shared__ V of_warp[kWarps];
#pragma unroll
  for (int delta = 1; delta < kWarp; delta *= 2) {
    const V other = shuffle_down(v, delta);
    if (threadIdx.x % (2 * delta) == 0) v = combine(v, other);
  }
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = v;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int w = 1; w < kWarps; ++w) v = combine(v, of_warp[w]);
  __syncthreads();  // the next call may overwrite of_warp
  return v;
}

}  // namespace megarl
