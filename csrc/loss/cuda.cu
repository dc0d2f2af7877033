#include "../common/cuda.cuh"
#include "token.h"

namespace megarl {
namespace {

constexpr int kThreads = 256;

struct Sums {
  double v[kLossSums];
};

__device__ __forceinline__ Sums add(Sums a, const Sums& b) {
  add_sums(a.v, b.v);
  return a;
}

// One block per chunk of tokens: the loss of each token, and the chunk's metrics.
template <class T>
__global__ void __launch_bounds__(kThreads) policy_loss_kernel(const PolicyLossArgs a) {
  const int64_t begin = blockIdx.x * kLossChunk;
  const int64_t end = begin + kLossChunk < a.tokens ? begin + kLossChunk : a.tokens;
  Sums sums{};
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) policy_loss_token<T>(a, t, sums.v);
  sums = block_reduce<kThreads>(sums, [](const auto& l, const auto& r) { return add(l, r); });
  if (threadIdx.x == 0) reinterpret_cast<Sums*>(a.partials)[blockIdx.x] = sums;
}

__global__ void add_sums_kernel(int64_t chunks, const double* partials, double* sums) {
  Sums all{};
  for (int64_t c = 0; c < chunks; ++c) all = add(all, reinterpret_cast<const Sums*>(partials)[c]);
  *reinterpret_cast<Sums*>(sums) = all;
}

struct SumCount {
  double sum, count;
};

template <class T>
__global__ void __launch_bounds__(kThreads) segment_sum_kernel(const SegmentSumArgs a) {
  const int64_t b = blockIdx.x;
  SumCount s{0, 0};
  for (int64_t t = a.cu_seqlens[b] + threadIdx.x; t < a.cu_seqlens[b + 1]; t += kThreads) {
    if (!a.mask[t]) continue;
    s.sum += static_cast<const T*>(a.x)[t];
    s.count += 1;
  }
  s = block_reduce<kThreads>(
      s, [](const SumCount& l, const SumCount& r) { return SumCount{l.sum + r.sum, l.count + r.count}; });
  if (threadIdx.x == 0) reinterpret_cast<SumCount*>(a.sums)[b] = s;
}

}  // namespace

void policy_loss_cuda(const PolicyLossArgs& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const unsigned chunks = blocks_for(args.tokens, kLossChunk);
  if (chunks && args.dtype == static_cast<int>(DType::kFloat64)) {
    policy_loss_kernel<double><<<chunks, kThreads, 0, on>>>(args);
  } else if (chunks) {
    policy_loss_kernel<float><<<chunks, kThreads, 0, on>>>(args);
  }
  add_sums_kernel<<<1, 1, 0, on>>>(chunks, args.partials, args.sums);
  check_launch("policy_loss");
}

void segment_sum_cuda(const SegmentSumArgs& args, void* stream) {
  if (args.sequences == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  const unsigned blocks = static_cast<unsigned>(args.sequences);
  if (args.dtype == static_cast<int>(DType::kFloat64)) {
    segment_sum_kernel<double><<<blocks, kThreads, 0, on>>>(args);
  } else {
    segment_sum_kernel<float><<<blocks, kThreads, 0, on>>>(args);
  }
  check_launch("segment_sum");
}

}  // namespace megarl
