// One block per row. Each thread keeps running statistics over its own columns, with one exponential per
// element. The block then merges them in a fixed tree. A column's thread does not depend on alignment, so a
// row gives the same bits anywhere in memory.
//
// A block waits for its label, its first columns and its last reduction. Rows of short vocabularies take
// smaller blocks, so that more of them are in flight on an SM and hide these waits.
#include "../common/cuda.cuh"
#include "../common/row_math.h"
#include "api.h"

namespace megarl {
namespace {

constexpr int kThreadsPerSm = 1024;  // in flight: 64 registers each
constexpr int kLongThreads = 512, kShortThreads = 128;
constexpr int64_t kLongVocabulary = 65536;  // columns from which a row takes a block of kLongThreads
constexpr int kGroup = 8;                   // adjacent columns of a thread

// Groups with which each thread has 64 bytes of a row in flight.
template <class T>
constexpr int kGroups = 64 / (kGroup * static_cast<int>(sizeof(T)));

__device__ __forceinline__ uint32_t bits_of(float x) {
  return __float_as_uint(x);
}
__device__ __forceinline__ uint32_t bits_of(BFloat16 x) {
  return x.bits;
}
__device__ __forceinline__ uint32_t bits_of(Float16 x) {
  return x.bits;
}

template <class T>
__device__ __forceinline__ T of_bits(uint32_t bits) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(bits);
  } else {
    return T{static_cast<uint16_t>(bits)};
  }
}

// Adjacent elements packed in 32-bit words. The compiler would put arrays of 16-bit structs in local memory.
template <class T>
struct Group {
  static constexpr int kPerWord = 4 / sizeof(T), kWords = kGroup / kPerWord;
  uint32_t words[kWords];

  __device__ __forceinline__ T get(int i) const {
    return of_bits<T>(words[i / kPerWord] >> (16 * (i % kPerWord)));
  }
  // Must be called for each element once, in order.
  __device__ __forceinline__ void set(int i, T x) {
    const uint32_t shifted = bits_of(x) << (16 * (i % kPerWord));
    words[i / kPerWord] = i % kPerWord == 0 ? shifted : words[i / kPerWord] | shifted;
  }
};

// Loads columns [c, c + kGroup) of a row, with -infinity from `valid` on.
template <class T, bool kAligned>
__device__ __forceinline__ Group<T> load_group(const T* row, int64_t c, int64_t valid) {
  Group<T> g;
  if (kAligned && c + kGroup <= valid) {
#pragma unroll
    for (int i = 0; i < Group<T>::kWords; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(reinterpret_cast<const uint32_t*>(row + c) + i);
      g.words[i] = four.x;
      g.words[i + 1] = four.y;
      g.words[i + 2] = four.z;
      g.words[i + 3] = four.w;
    }
    return g;
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) g.set(i, c + i < valid ? row[c + i] : from_float<T>(-INFINITY));
  return g;
}

template <class T, bool kAligned>
__device__ __forceinline__ void store_group(T* row, int64_t c, int64_t columns, const Group<T>& g) {
  if (kAligned && c + kGroup <= columns) {
#pragma unroll
    for (int i = 0; i < Group<T>::kWords; i += 4)
      *reinterpret_cast<uint4*>(reinterpret_cast<uint32_t*>(row + c) + i) =
          make_uint4(g.words[i], g.words[i + 1], g.words[i + 2], g.words[i + 3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i)
    if (c + i < columns) row[c + i] = g.get(i);
}

template <class T, bool kDot>
__device__ __forceinline__ void add_groups(const Group<T> (&g)[kGroups<T>], float inv_temp,
                                           RowStats<float>& s) {
  float top = s.max;
#pragma unroll
  for (int u = 0; u < kGroups<T>; ++u)
#pragma unroll
    for (int i = 0; i < kGroup; ++i) top = fmaxf(top, to_float(g[u].get(i)));  // ignores NaN
  s = rescale(s, top, inv_temp);
  const float max = top == -INFINITY ? 0.0f : top, scale = inv_temp * static_cast<float>(kLog2E);
  float sum = 0, dot = 0;
#pragma unroll
  for (int u = 0; u < kGroups<T>; ++u)
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float w = (to_float(g[u].get(i)) - max) * scale;
      const float e = exp2_approx(w);
      sum += e;
      if (kDot) dot += e * fmaxf(w, -200.0f);  // e is 0 there; avoids 0 * -inf
    }
  s.sum += sum;
  s.dot += dot * static_cast<float>(kLn2);
}

__device__ __forceinline__ void store_result(const RowsArgs& a, int64_t row, const RowResult<float>& r,
                                             float max) {
  static_cast<float*>(a.logprob)[row] = r.logprob;
  static_cast<float*>(a.entropy)[row] = r.entropy;
  float* context = static_cast<float*>(a.context) + 3 * row;
  context[0] = max;
  context[1] = r.log_sum;
  context[2] = r.entropy;
}

// Writes a row's statistics, or its results where `a` has a place for them. Called by one thread.
__device__ __forceinline__ void finish(const RowsArgs& a, int64_t row, const RowStats<float>& s,
                                       float label_logit) {
  if (a.logprob) {
    const double inv_temp = a.stats.inv_temp[row * a.stats.temp_stride];
    const RowStats<float> all =
        merge(empty_stats<float>(), s, static_cast<float>(inv_temp));  // as of one rank
    store_result(a, row, finish_row(all, label_logit, inv_temp), all.max);
  } else {
    static_cast<float4*>(a.stats.stats)[row] = make_float4(s.max, s.sum, s.dot, label_logit);
  }
}

template <int kThreads, class T, bool kAligned, bool kDot>
__global__ void __launch_bounds__(kThreads, kThreadsPerSm / kThreads) stats_kernel(const RowsArgs args) {
  const StatsArgs& a = args.stats;
  const int64_t row = blockIdx.x, label = a.labels[row], valid = a.shape.valid;
  if (label == -1) {
    if (threadIdx.x != 0) return;
    if (args.logprob)
      store_result(args, row, RowResult<float>{0, 0, 0}, 0);
    else
      static_cast<float4*>(a.stats)[row] = make_float4(0, 0, 0, 0);
    return;
  }
  const T* x = static_cast<const T*>(a.logits) + row * a.shape.row_stride;
  const float inv_temp = static_cast<float>(a.inv_temp[row * a.temp_stride]);
  const int64_t column = label - a.shape.vocab_start;
  float label_logit = NAN;  // loaded before the columns, not after their reduction
  if (threadIdx.x == 0 && column >= 0 && column < valid) label_logit = to_float(x[column]);
  RowStats<float> s = empty_stats<float>();
  constexpr int64_t kSpan = kThreads * kGroup;
  for (int64_t c = threadIdx.x * kGroup; c < valid; c += kSpan * kGroups<T>) {
    Group<T> g[kGroups<T>];
#pragma unroll
    for (int u = 0; u < kGroups<T>; ++u) g[u] = load_group<T, kAligned>(x, c + u * kSpan, valid);
    add_groups<T, kDot>(g, inv_temp, s);
  }
  s = block_reduce<kThreads>(s, [inv_temp](const auto& l, const auto& r) { return merge(l, r, inv_temp); });
  if (threadIdx.x == 0) finish(args, row, s, label_logit);
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

template <int kThreads, class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kThreadsPerSm / kThreads) backward_kernel(const BackwardArgs a) {
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
  constexpr int kHeld = kAligned ? kGroups<T> : 1;  // unaligned, more groups would not fit the registers
  for (int64_t c = threadIdx.x * kGroup; c < columns; c += kSpan * kHeld) {
    Group<T> v[kHeld];
#pragma unroll
    for (int u = 0; u < kHeld; ++u) v[u] = load_group<T, kAligned>(x, c + u * kSpan, valid);
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int64_t first = c + u * kSpan;
      Group<T> out;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float w = (to_float(v[u].get(i)) - k.max) * k.scale - k.log2_sum;
        float d = gradient_element(exp2_approx(w), fmaxf(w, -200.0f), k);
        if (first + i == column) d += k.label;
        out.set(i, from_float<T>(first + i < valid ? d : 0.0f));
      }
      if (first < columns) store_group<T, kAligned>(grad, first, columns, out);
    }
  }
}

bool aligned(const void* base, int64_t stride, size_t size) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride * static_cast<int64_t>(size) % 16 == 0;
}

template <class Fn>
void dispatch_device_dtype(int dtype, const char* op, Fn&& fn) {
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat32:
      return fn(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return fn(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return fn(static_cast<Float16*>(nullptr));
    default:
      throw std::invalid_argument(std::string(op) + ": CUDA takes float32, bfloat16 and float16");
  }
}

// Launches one block a row.
template <int kThreads, class T>
void launch_stats(const RowsArgs& args, cudaStream_t stream) {
  const StatsArgs& a = args.stats;
  const bool fast = aligned(a.logits, a.shape.row_stride, sizeof(T));
  const auto kernel =
      a.with_entropy
          ? (fast ? stats_kernel<kThreads, T, true, true> : stats_kernel<kThreads, T, false, true>)
          : (fast ? stats_kernel<kThreads, T, true, false> : stats_kernel<kThreads, T, false, false>);
  kernel<<<static_cast<unsigned>(a.shape.rows), kThreads, 0, stream>>>(args);
}

template <int kThreads, class T>
void launch_backward(const BackwardArgs& args, cudaStream_t stream) {
  const bool fast = aligned(args.logits, args.shape.row_stride, sizeof(T)) &&
                    aligned(args.grad, args.grad_stride, sizeof(T));
  const auto kernel = fast ? backward_kernel<kThreads, T, true> : backward_kernel<kThreads, T, false>;
  kernel<<<static_cast<unsigned>(args.shape.rows), kThreads, 0, stream>>>(args);
}

}  // namespace

void logprob_rows_cuda(const RowsArgs& args, void* stream) {
  const LogitRows& shape = args.stats.shape;
  if (shape.rows == 0) return;
  dispatch_device_dtype(shape.dtype, "logprob_stats", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto launch =
        shape.columns < kLongVocabulary ? launch_stats<kShortThreads, T> : launch_stats<kLongThreads, T>;
    launch(args, static_cast<cudaStream_t>(stream));
  });
  check_launch("logprob_stats");
}

void logprob_stats_cuda(const StatsArgs& args, void* stream) {
  logprob_rows_cuda(RowsArgs{args, nullptr, nullptr, nullptr}, stream);
}

void logprob_merge_cuda(const MergeArgs& args, void* stream) {
  if (args.rows == 0) return;
  merge_kernel<<<blocks_for(args.rows, 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("logprob_merge");
}

void logprob_backward_cuda(const BackwardArgs& args, void* stream) {
  const LogitRows& shape = args.shape;
  if (shape.rows == 0) return;
  dispatch_device_dtype(shape.dtype, "logprob_backward", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto launch = shape.columns < kLongVocabulary ? launch_backward<kShortThreads, T>
                                                        : launch_backward<kLongThreads, T>;
    launch(args, static_cast<cudaStream_t>(stream));
  });
  check_launch("logprob_backward");
}

}  // namespace megarl
