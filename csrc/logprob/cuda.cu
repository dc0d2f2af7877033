// One block a row. Each thread keeps running statistics over its own columns and takes one exponential an element;
// the block then merges them in a fixed tree. Which thread owns a column never depends on alignment, so a row gives
// the same bits wherever it lies in memory.
#include "../common/cuda.cuh"
#include "../common/row_math.h"
#include "api.h"

namespace megarl {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 2;
constexpr int kGroup = 8;  // adjacent columns of a thread

// Sixty-four bytes of a row in flight for each thread.
template <class T>
constexpr int kGroups = 64 / (kGroup * static_cast<int>(sizeof(T)));

template <class T>
struct alignas(16) Group {
  T v[kGroup];
};

template <class T>
__device__ __forceinline__ T minus_infinity();
template <>
__device__ __forceinline__ float minus_infinity<float>() {
  return -INFINITY;
}
template <>
__device__ __forceinline__ BFloat16 minus_infinity<BFloat16>() {
  return {0xff80};
}
template <>
__device__ __forceinline__ Float16 minus_infinity<Float16>() {
  return {0xfc00};
}

// Columns [c, c + kGroup) of a row, -infinity from `valid` on.
template <class T, bool kAligned>
__device__ __forceinline__ Group<T> load_group(const T* row, int64_t c, int64_t valid) {
  Group<T> g;
  if (kAligned && c + kGroup <= valid) {
    constexpr int kWords = sizeof(Group<T>) / sizeof(uint4);
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      reinterpret_cast<uint4*>(&g)[i] = reinterpret_cast<const uint4*>(row + c)[i];
    return g;
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) g.v[i] = c + i < valid ? row[c + i] : minus_infinity<T>();
  return g;
}

template <class T, bool kAligned>
__device__ __forceinline__ void store_group(T* row, int64_t c, int64_t columns, const Group<T>& g) {
  if (kAligned && c + kGroup <= columns) {
    constexpr int kWords = sizeof(Group<T>) / sizeof(uint4);
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      reinterpret_cast<uint4*>(row + c)[i] = reinterpret_cast<const uint4*>(&g)[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i)
    if (c + i < columns) row[c + i] = g.v[i];
}

template <class T>
__device__ __forceinline__ void add_groups(const Group<T> (&g)[kGroups<T>], float inv_temp, RowStats<float>& s) {
  float top = s.max;
#pragma unroll
  for (int u = 0; u < kGroups<T>; ++u)
#pragma unroll
    for (int i = 0; i < kGroup; ++i) top = fmaxf(top, to_float(g[u].v[i]));  // passes over NaN
  s = rescale(s, top, inv_temp);
  const float max = top == -INFINITY ? 0.0f : top, scale = inv_temp * static_cast<float>(kLog2E);
  float sum = 0, dot = 0;
#pragma unroll
  for (int u = 0; u < kGroups<T>; ++u)
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float w = (to_float(g[u].v[i]) - max) * scale;
      const float e = exp2_approx(w);
      sum += e;
      dot += e * fmaxf(w, -200.0f);  // e is 0 there: spares 0 * -inf
    }
  s.sum += sum;
  s.dot += dot * static_cast<float>(kLn2);
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) stats_kernel(const StatsArgs a) {
  const int64_t row = blockIdx.x, label = a.labels[row], valid = a.shape.valid;
  float* out = static_cast<float*>(a.stats) + 4 * row;
  if (label == -1) {
    if (threadIdx.x < 4) out[threadIdx.x] = 0;
    return;
  }
  const T* x = static_cast<const T*>(a.logits) + row * a.shape.row_stride;
  const float inv_temp = static_cast<float>(a.inv_temp[row * a.temp_stride]);
  RowStats<float> s = empty_stats<float>();
  constexpr int64_t kSpan = kThreads * kGroup;
  for (int64_t c = threadIdx.x * kGroup; c < valid; c += kSpan * kGroups<T>) {
    Group<T> g[kGroups<T>];
#pragma unroll
    for (int u = 0; u < kGroups<T>; ++u) g[u] = load_group<T, kAligned>(x, c + u * kSpan, valid);
    add_groups<T>(g, inv_temp, s);
  }
  s = block_reduce<kThreads>(s, [inv_temp](const auto& l, const auto& r) { return merge(l, r, inv_temp); });
  if (threadIdx.x != 0) return;
  const int64_t column = label - a.shape.vocab_start;
  out[0] = s.max;
  out[1] = s.sum;
  out[2] = s.dot;
  out[3] = column >= 0 && column < valid ? to_float(x[column]) : NAN;
}

__global__ void merge_kernel(const MergeArgs a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= a.rows) return;
  float* context = static_cast<float*>(a.context) + 3 * row;
  RowResult<float> r{0, 0, 0};
  float max = 0;
  if (a.labels[row] != -1) {
    const double inv_temp = a.inv_temp[row * a.temp_stride];
    RowStats<float> all = empty_stats<float>();
    float label_logit = NAN;
    for (int64_t rank = 0; rank < a.ranks; ++rank) {
      const float4 s = static_cast<const float4*>(a.stats)[rank * a.rows + row];
      all = merge(all, RowStats<float>{s.x, s.y, s.z}, static_cast<float>(inv_temp));
      if (s.w == s.w) label_logit = s.w;
    }
    r = finish_row(all, label_logit, inv_temp);
    max = all.max;
  }
  static_cast<float*>(a.logprob)[row] = r.logprob;
  static_cast<float*>(a.entropy)[row] = r.entropy;
  context[0] = max;
  context[1] = r.log_sum;
  context[2] = r.entropy;
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) backward_kernel(const BackwardArgs a) {
  const int64_t row = blockIdx.x, label = a.labels[row], columns = a.shape.columns;
  T* grad = static_cast<T*>(a.grad) + row * a.grad_stride;
  const float g = static_cast<const float*>(a.grad_logprob)[row];
  const float h = a.grad_entropy ? static_cast<const float*>(a.grad_entropy)[row] : 0.0f;
  const bool nothing = label == -1 || (g == 0 && h == 0);
  const int64_t valid = nothing ? 0 : a.shape.valid, column = label - a.shape.vocab_start;
  const T* x = static_cast<const T*>(a.logits) + row * a.shape.row_stride;
  const float* context = static_cast<const float*>(a.context) + 3 * row;
  const float inv_temp = static_cast<float>(a.inv_temp[row * a.temp_stride]);
  const RowGradient<float> k = row_gradient(context[0], context[1], context[2], g, h, inv_temp);
  constexpr int64_t kSpan = kThreads * kGroup;
  for (int64_t c = threadIdx.x * kGroup; c < columns; c += kSpan * kGroups<T>) {
    Group<T> v[kGroups<T>];
#pragma unroll
    for (int u = 0; u < kGroups<T>; ++u) v[u] = load_group<T, kAligned>(x, c + u * kSpan, valid);
#pragma unroll
    for (int u = 0; u < kGroups<T>; ++u) {
      const int64_t first = c + u * kSpan;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float w = (to_float(v[u].v[i]) - k.max) * k.scale - k.log2_sum;
        float d = gradient_element(exp2_approx(w), fmaxf(w, -200.0f), k);
        if (first + i == column) d += k.label;
        v[u].v[i] = from_float<T>(first + i < valid ? d : 0.0f);
      }
      if (first < columns) store_group<T, kAligned>(grad, first, columns, v[u]);
    }
  }
}

bool aligned(const void* base, int64_t stride, size_t size) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride * static_cast<int64_t>(size) % 16 == 0;
}

template <class Fn>
void dispatch_device_dtype(int dtype, const char* op, Fn&& fn) {
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat32: return fn(static_cast<float*>(nullptr));
    case DType::kBFloat16: return fn(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16: return fn(static_cast<Float16*>(nullptr));
    default: throw std::invalid_argument(std::string(op) + ": CUDA takes float32, bfloat16 and float16");
  }
}

}  // namespace

void logprob_stats_cuda(const StatsArgs& args, void* stream) {
  if (args.shape.rows == 0) return;
  dispatch_device_dtype(args.shape.dtype, "logprob_stats", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto kernel =
        aligned(args.logits, args.shape.row_stride, sizeof(T)) ? stats_kernel<T, true> : stats_kernel<T, false>;
    kernel<<<static_cast<unsigned>(args.shape.rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("logprob_stats");
}

void logprob_merge_cuda(const MergeArgs& args, void* stream) {
  if (args.rows == 0) return;
  merge_kernel<<<blocks_for(args.rows, 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("logprob_merge");
}

void logprob_backward_cuda(const BackwardArgs& args, void* stream) {
  if (args.shape.rows == 0) return;
  dispatch_device_dtype(args.shape.dtype, "logprob_backward", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const bool fast = aligned(args.logits, args.shape.row_stride, sizeof(T)) &&
                      aligned(args.grad, args.grad_stride, sizeof(T));
    const auto kernel = fast ? backward_kernel<T, true> : backward_kernel<T, false>;
    kernel<<<static_cast<unsigned>(args.shape.rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  check_launch("logprob_backward");
}

}  // namespace megarl
