#include "../common/lanes.h"
#include "../common/parallel.h"
#include "../common/row_math.h"
#include "api.h"

namespace megarl {
namespace {

// Columns per tile: its logits stay in the first-level cache between the pass for the maximum and the pass for
// the exponentials, so memory is read once and one exponential is taken an element.
constexpr int64_t kTile = 4096;
constexpr int kUnroll = 4;

template <class T>
MEGARL_HD accumulator_t<T> tile_max(const T* x, int64_t n) {
  using A = accumulator_t<T>;
  using V = lanes_t<A>;
  V best[kUnroll];
  for (auto& b : best) b = V{} + negative_infinity<A>();
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= n; i += kUnroll * kLanes)
    for (int u = 0; u < kUnroll; ++u) {
      const V v = load_lanes(x + i + u * kLanes);
      best[u] = v > best[u] ? v : best[u];
    }
  for (; i < n; i += kLanes) {
    const V v = n - i >= kLanes ? load_lanes(x + i) : load_tail(x + i, static_cast<int>(n - i), minus_infinity<T>());
    best[0] = v > best[0] ? v : best[0];
  }
  for (int u = 1; u < kUnroll; ++u) best[0] = best[u] > best[0] ? best[u] : best[0];
  return horizontal_max<A>(best[0]);
}

template <class V, class A>
MEGARL_HD void add_exponentials(V x, A max, A scale, V& sum, V& dot) {
  const V w = (x - max) * scale;
  const V e = exp2_lanes(w);
  const V bounded = w < A(-1e30) ? V{} : w;  // e is 0 there: spares 0 * -inf
  sum += e;
  dot += e * bounded;
}

template <class T>
MEGARL_HD RowStats<accumulator_t<T>> row_stats(const T* x, int64_t n, accumulator_t<T> inv_temp) {
  using A = accumulator_t<T>;
  using V = lanes_t<A>;
  RowStats<A> row = empty_stats<A>();
  const A scale = inv_temp * A(kLog2E);
  for (int64_t start = 0; start < n; start += kTile) {
    const T* tile = x + start;
    const int64_t count = n - start < kTile ? n - start : kTile;
    const A top = tile_max(tile, count);
    if (top > row.max) row = rescale(row, top, inv_temp);
    const A max = row.max == negative_infinity<A>() ? A(0) : row.max;
    V sum[kUnroll] = {}, dot[kUnroll] = {};
    int64_t i = 0;
    for (; i + kUnroll * kLanes <= count; i += kUnroll * kLanes)
      for (int u = 0; u < kUnroll; ++u) add_exponentials(load_lanes(tile + i + u * kLanes), max, scale, sum[u], dot[u]);
    for (; i < count; i += kLanes) {
      const V v = count - i >= kLanes ? load_lanes(tile + i)
                                      : load_tail(tile + i, static_cast<int>(count - i), minus_infinity<T>());
      add_exponentials(v, max, scale, sum[0], dot[0]);
    }
    row.sum += horizontal_sum<A>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    row.dot += horizontal_sum<A>((dot[0] + dot[1]) + (dot[2] + dot[3])) * A(kLn2);
  }
  return row;
}

template <class V, class A>
MEGARL_HD V row_gradient_lanes(V x, const RowGradient<A>& k) {
  const V w = (x - k.max) * k.scale - k.log2_sum;
  const V p = exp2_lanes(w);
  const V bounded = w < A(-1e30) ? V{} : w;
  return gradient_element<V, A>(p, bounded, k);
}

template <class T>
MEGARL_HD void row_backward(const T* x, T* grad, int64_t valid, int64_t columns, int64_t label,
                            const RowGradient<accumulator_t<T>>& k) {
  using A = accumulator_t<T>;
  using V = lanes_t<A>;
  // The label's column gets a summand of its own, from the logit as it was before it is overwritten.
  A label_grad = 0;
  const bool here = label >= 0 && label < valid;
  if (here) label_grad = row_gradient_lanes<V, A>(load_tail(x + label, 1, minus_infinity<T>()), k)[0] + k.label;
  int64_t i = 0;
  for (; i + kLanes <= valid; i += kLanes) store_lanes(grad + i, row_gradient_lanes<V, A>(load_lanes(x + i), k));
  if (i < valid) {
    const int count = static_cast<int>(valid - i);
    store_tail(grad + i, row_gradient_lanes<V, A>(load_tail(x + i, count, minus_infinity<T>()), k), count);
  }
  if (here) store_tail(grad + label, V{} + label_grad, 1);
  std::memset(static_cast<void*>(grad + valid), 0, (columns - valid) * sizeof(T));
}

// target_clones wants plain functions, so each element type has its own.
#define MEGARL_ROW_FUNCTIONS(T)                                                                          \
  MEGARL_MULTIARCH RowStats<accumulator_t<T>> stats_of_row(const T* x, int64_t n, accumulator_t<T> it) { \
    return row_stats(x, n, it);                                                                          \
  }                                                                                                      \
  MEGARL_MULTIARCH void backward_of_row(const T* x, T* grad, int64_t valid, int64_t columns,             \
                                        int64_t label, const RowGradient<accumulator_t<T>>& k) {         \
    row_backward(x, grad, valid, columns, label, k);                                                     \
  }
MEGARL_ROW_FUNCTIONS(float)
MEGARL_ROW_FUNCTIONS(BFloat16)
MEGARL_ROW_FUNCTIONS(Float16)
MEGARL_ROW_FUNCTIONS(double)
#undef MEGARL_ROW_FUNCTIONS

template <class T>
accumulator_t<T> element(const T* x, int64_t i) {
  return load_tail(x + i, 1, minus_infinity<T>())[0];
}

template <class T>
void stats_rows(const StatsArgs& a, int threads) {
  using A = accumulator_t<T>;
  const LogitRows& shape = a.shape;
  parallel_for(shape.rows, shape.valid, threads, [&](int64_t row) {
    A* out = static_cast<A*>(a.stats) + 4 * row;
    const int64_t label = a.labels[row];
    if (label == -1) {
      out[0] = out[1] = out[2] = out[3] = 0;
      return;
    }
    const T* x = static_cast<const T*>(a.logits) + row * shape.row_stride;
    const A inv_temp = static_cast<const A*>(a.inv_temp)[row * a.temp_stride];
    const RowStats<A> s = stats_of_row(x, shape.valid, inv_temp);
    const int64_t column = label - shape.vocab_start;
    out[0] = s.max;
    out[1] = s.sum;
    out[2] = s.dot;
    out[3] = column >= 0 && column < shape.valid ? element(x, column) : A(NAN);
  });
}

template <class A>
void merge_rows(const MergeArgs& a, int threads) {
  parallel_for(a.rows, 64 * a.ranks, threads, [&](int64_t row) {
    A* logprob = static_cast<A*>(a.logprob) + row;
    A* entropy = static_cast<A*>(a.entropy) + row;
    A* context = static_cast<A*>(a.context) + 3 * row;
    if (a.labels[row] == -1) {
      *logprob = *entropy = context[0] = context[1] = context[2] = 0;
      return;
    }
    const A inv_temp = static_cast<const A*>(a.inv_temp)[row * a.temp_stride];
    RowStats<A> all = empty_stats<A>();
    A label_logit = NAN;
    for (int64_t rank = 0; rank < a.ranks; ++rank) {
      const A* s = static_cast<const A*>(a.stats) + 4 * (rank * a.rows + row);
      all = merge(all, RowStats<A>{s[0], s[1], s[2]}, inv_temp);
      if (s[3] == s[3]) label_logit = s[3];
    }
    const RowResult<A> r = finish_row(all, label_logit, inv_temp);
    *logprob = r.logprob;
    *entropy = r.entropy;
    context[0] = all.max;
    context[1] = r.log_sum;
    context[2] = r.entropy;
  });
}

template <class T>
void backward_rows(const BackwardArgs& a, int threads) {
  using A = accumulator_t<T>;
  const LogitRows& shape = a.shape;
  parallel_for(shape.rows, 2 * shape.columns, threads, [&](int64_t row) {
    T* grad = static_cast<T*>(a.grad) + row * a.grad_stride;
    const int64_t label = a.labels[row];
    const A g = static_cast<const A*>(a.grad_logprob)[row];
    const A h = a.grad_entropy ? static_cast<const A*>(a.grad_entropy)[row] : A(0);
    if (label == -1 || (g == 0 && h == 0)) {
      std::memset(static_cast<void*>(grad), 0, shape.columns * sizeof(T));
      return;
    }
    const T* x = static_cast<const T*>(a.logits) + row * shape.row_stride;
    const A* context = static_cast<const A*>(a.context) + 3 * row;
    const A inv_temp = static_cast<const A*>(a.inv_temp)[row * a.temp_stride];
    const RowGradient<A> k = row_gradient(context[0], context[1], context[2], g, h, inv_temp);
    backward_of_row(x, grad, shape.valid, shape.columns, label - shape.vocab_start, k);
  });
}

}  // namespace

void logprob_stats_cpu(const StatsArgs& args, int threads) {
  dispatch_dtype(args.shape.dtype, "logprob_stats",
                 [&](auto* type) { stats_rows<std::remove_pointer_t<decltype(type)>>(args, threads); });
}

void logprob_merge_cpu(const MergeArgs& args, int threads) {
  if (args.dtype == static_cast<int>(DType::kFloat64)) return merge_rows<double>(args, threads);
  merge_rows<float>(args, threads);
}

void logprob_backward_cpu(const BackwardArgs& args, int threads) {
  dispatch_dtype(args.shape.dtype, "logprob_backward",
                 [&](auto* type) { backward_rows<std::remove_pointer_t<decltype(type)>>(args, threads); });
}

}  // namespace megarl
