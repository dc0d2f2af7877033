#include "../common/cuda.cuh"
#include "group.h"

namespace megarl {
namespace {

constexpr int kThreads = 256;

__global__ void group_kernel(const GroupAdvantageArgs a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < a.batch) group_at(a, i);
}

__global__ void __launch_bounds__(kThreads) moments_kernel(const MomentsArgs a) {
  const int64_t begin = blockIdx.x * kMomentChunk;
  const int64_t end = begin + kMomentChunk < a.tokens ? begin + kMomentChunk : a.tokens;
  Moments m{0, 0, 0};
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads)
    if (a.mask[i]) m = merge(m, Moments{1, a.x[i], 0});
  m = block_reduce<kThreads>(m, [](const auto& l, const auto& r) { return merge(l, r); });
  if (threadIdx.x == 0) reinterpret_cast<Moments*>(a.partials)[blockIdx.x] = m;
}

__global__ void merge_moments_kernel(const MergeMomentsArgs a) {
  Moments all{0, 0, 0};
  for (int64_t i = 0; i < a.count; ++i) all = merge(all, reinterpret_cast<const Moments*>(a.parts)[i]);
  *reinterpret_cast<Moments*>(a.moments) = all;
}

__global__ void whiten_kernel(const WhitenArgs a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= a.tokens) return;
  const Moments m = *reinterpret_cast<const Moments*>(a.moments);
  a.out[i] = a.mask[i] ? static_cast<float>(whiten(a.x[i], m, a.eps, a.keep_mean, a.clip)) : 0.0f;
}

// Exclusive scan over the threads of a block: thread i gets v_0 then v_1 ... then v_{i-1}. `total` gets the
// combination of all threads. `then(first, second)` applies `first` before `second`.
template <class V, class Then>
__device__ __forceinline__ V block_scan(V v, const V& identity, const Then& then, V* total) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ V of_warp[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  V inclusive = v;
#pragma unroll
  for (int delta = 1; delta < kWarp; delta *= 2) {
    V other;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(V) / 4); ++i)
      reinterpret_cast<unsigned*>(&other)[i] =
          __shfl_up_sync(kAllLanes, reinterpret_cast<const unsigned*>(&inclusive)[i], delta);
    if (lane >= delta) inclusive = then(other, inclusive);
  }
  if (lane == kWarp - 1) of_warp[warp] = inclusive;
  V before;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(V) / 4); ++i)
    reinterpret_cast<unsigned*>(&before)[i] =
        __shfl_up_sync(kAllLanes, reinterpret_cast<const unsigned*>(&inclusive)[i], 1);
  if (lane == 0) before = identity;
  __syncthreads();
  V prefix = identity, all = identity;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) prefix = all;
    all = then(all, of_warp[w]);
  }
  __syncthreads();  // the next call may overwrite of_warp
  *total = all;
  return then(prefix, before);
}

// One block per sequence, from its last token. Each thread composes four tokens into one map. A scan of the
// maps gives each thread its start state, from which it replays its tokens.
__global__ void __launch_bounds__(kThreads) gae_kernel(const GaeArgs a) {
  constexpr int kTokens = 4;
  const int64_t b = blockIdx.x, begin = a.cu_seqlens[b];
  const double lambda = a.lambda[b * a.lambda_stride];
  GaeState carry{0, a.bootstrap ? a.bootstrap[b] : 0.0};
  for (int64_t end = a.cu_seqlens[b + 1]; end > begin; end -= kThreads * kTokens) {
    const int64_t last = end - 1 - static_cast<int64_t>(threadIdx.x) * kTokens;
    GaeMap maps[kTokens], mine = gae_identity();
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int64_t t = last - i;
      maps[i] =
          t >= begin && a.mask[t] ? gae_token(a.rewards[t], a.values[t], a.gamma, lambda) : gae_identity();
      mine = compose(maps[i], mine);
    }
    GaeMap total;
    const GaeMap before = block_scan(
        mine, gae_identity(), [](const auto& later, const auto& earlier) { return compose(earlier, later); },
        &total);
    GaeState state = apply(before, carry);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int64_t t = last - i;
      state = apply(maps[i], state);
      if (t < begin) continue;
      a.advantages[t] = maps[i].sets_value ? static_cast<float>(state.advantage) : 0.0f;
      a.returns[t] = maps[i].sets_value ? static_cast<float>(state.advantage + maps[i].value) : 0.0f;
    }
    carry = apply(total, carry);
  }
}

}  // namespace

void group_advantage_cuda(const GroupAdvantageArgs& args, void* stream) {
  if (args.batch == 0) return;
  group_kernel<<<blocks_for(args.batch, 64), 64, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("group_advantage");
}

void moments_cuda(const MomentsArgs& args, void* stream) {
  const unsigned chunks = blocks_for(args.tokens, kMomentChunk);
  if (chunks) moments_kernel<<<chunks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("moments");
  merge_moments_cuda({chunks, args.partials, args.moments}, stream);
}

void merge_moments_cuda(const MergeMomentsArgs& args, void* stream) {
  merge_moments_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("merge_moments");
}

void whiten_cuda(const WhitenArgs& args, void* stream) {
  if (args.tokens == 0) return;
  whiten_kernel<<<blocks_for(args.tokens, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("whiten");
}

void gae_cuda(const GaeArgs& args, void* stream) {
  if (args.sequences == 0) return;
  gae_kernel<<<static_cast<unsigned>(args.sequences), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("gae");
}

}  // namespace megarl
