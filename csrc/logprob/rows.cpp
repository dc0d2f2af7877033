// Compiled once for each instruction set; MEGARL_ISA is the namespace of this copy.
#include "rows.h"

#include "../common/lanes.h"

namespace megarl {
namespace {

// Columns per tile. A tile stays in the first-level cache between the pass for the maximum and the pass for
// the exponentials, so memory is read once, with one exponential per element. The second pass prefetches the
// next tile.
constexpr int64_t kTile = 2048;
constexpr int kCacheLine = 64;
constexpr int kUnroll = 4;
constexpr int kStep = kUnroll * kLanes;

#ifdef __AVX512F__
// Takes pairs of bfloat16 as two floats each: the lower one shifted up, the upper one with zeros below it.
MEGARL_HD float tile_max(const BFloat16* x, int64_t n) {
  FloatLanes upper[2], lower[2];
  for (int u = 0; u < 2; ++u) upper[u] = lower[u] = FloatLanes{} - INFINITY;
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep)
    for (int u = 0; u < 2; ++u) {
      const UIntLanes pairs = load_raw<UIntLanes>(x + i + u * 2 * kLanes);
      upper[u] = max_lanes(bit_cast<FloatLanes>(pairs & 0xffff0000u), upper[u]);
      lower[u] = max_lanes(bit_cast<FloatLanes>(pairs << 16), lower[u]);
    }
  FloatLanes best = max_lanes(max_lanes(lower[1], lower[0]), max_lanes(upper[1], upper[0]));
  for (; i < n; i += kLanes)
    best = max_lanes(n - i >= kLanes ? load_lanes(x + i) : load_tail(x + i, static_cast<int>(n - i)), best);
  return horizontal_max<float>(best);
}
#endif

template <class T>
MEGARL_HD accumulator_t<T> tile_max(const T* x, int64_t n) {
  using A = accumulator_t<T>;
  using V = lanes_t<A>;
  V best[kUnroll];
  for (auto& b : best) b = V{} + negative_infinity<A>();
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep)
    for (int u = 0; u < kUnroll; ++u) best[u] = max_lanes(load_lanes(x + i + u * kLanes), best[u]);
  for (; i < n; i += kLanes)
    best[0] =
        max_lanes(n - i >= kLanes ? load_lanes(x + i) : load_tail(x + i, static_cast<int>(n - i)), best[0]);
  for (int u = 1; u < kUnroll; ++u) best[0] = max_lanes(best[u], best[0]);
  return horizontal_max<A>(best[0]);
}

template <class T, bool kDot, class V, class A>
MEGARL_HD void add_exponentials(V x, A max, A scale, V& sum, V& dot) {
  V w = (x - max) * scale;
  const V e = exp2_lanes<sizeof(T) == 2 ? 5 : 6>(w);
  sum += e;
  if (kDot) dot += e * w;
}

template <class T, bool kDot>
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
    for (; i + kStep <= count; i += kStep) {
      const char* ahead = reinterpret_cast<const char*>(tile + i + kTile);
      for (size_t byte = 0; byte < kStep * sizeof(T); byte += kCacheLine) __builtin_prefetch(ahead + byte);
      for (int u = 0; u < kUnroll; ++u)
        add_exponentials<T, kDot>(load_lanes(tile + i + u * kLanes), max, scale, sum[u], dot[u]);
    }
    for (; i < count; i += kLanes) {
      const int left = static_cast<int>(count - i);
      const V v = left >= kLanes ? load_lanes(tile + i) : load_tail(tile + i, left);
      add_exponentials<T, kDot>(v, max, scale, sum[0], dot[0]);
    }
    row.sum += horizontal_sum<A>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    row.dot += horizontal_sum<A>((dot[0] + dot[1]) + (dot[2] + dot[3])) * A(kLn2);
  }
  return row;
}

template <class T>
void stats(const T* x, int64_t n, int64_t label, accumulator_t<T> inv_temp, bool with_dot,
           accumulator_t<T>* out) {
  using A = accumulator_t<T>;
  const RowStats<A> s = with_dot ? row_stats<T, true>(x, n, inv_temp) : row_stats<T, false>(x, n, inv_temp);
  out[0] = s.max;
  out[1] = s.sum;
  out[2] = s.dot;
  out[3] = label >= 0 && label < n ? load_tail(x + label, 1)[0] : A(NAN);
}

template <int kDegree, class V, class A>
MEGARL_HD V gradient_lanes(V x, const RowGradient<A>& k) {
  V w = (x - k.max) * k.scale - k.log2_sum;
  const V p = exp2_lanes<kDegree>(w);
  return gradient_element<V, A>(p, w, k);
}

template <class T>
void backward(const T* x, T* grad, int64_t valid, int64_t columns, int64_t label,
              const RowGradient<accumulator_t<T>>& coefficients) {
  using A = accumulator_t<T>;
  using V = lanes_t<A>;
  const RowGradient<A> k = coefficients;
  constexpr int kDegree = sizeof(T) == 2 ? 4 : 6;
  // The label's column has an additional term. It is computed first, because `grad` may overwrite the logit.
  // Near p = 1 the terms cancel, so the exponential has full precision.
  const bool here = label >= 0 && label < valid;
  A label_grad = 0;
  if (here) label_grad = gradient_lanes<6, V, A>(load_tail(x + label, 1), k)[0] + k.label;
  int64_t i = 0;
  for (; i + kStep <= valid; i += kStep) {
    V v[kUnroll];
    for (int u = 0; u < kUnroll; ++u) v[u] = gradient_lanes<kDegree, V, A>(load_lanes(x + i + u * kLanes), k);
    for (int u = 0; u < kUnroll; ++u) store_lanes(grad + i + u * kLanes, v[u]);
  }
  for (; i < valid; i += kLanes) {
    const int left = static_cast<int>(valid - i);
    if (left >= kLanes) {
      store_lanes(grad + i, gradient_lanes<kDegree, V, A>(load_lanes(x + i), k));
    } else {
      store_tail(grad + i, gradient_lanes<kDegree, V, A>(load_tail(x + i, left), k), left);
    }
  }
  if (here) store_tail(grad + label, V{} + label_grad, 1);
  std::memset(static_cast<void*>(grad + valid), 0, (columns - valid) * sizeof(T));
}

}  // namespace

namespace MEGARL_ISA {

AllRowKernels row_kernels() {
  return {{stats<float>, backward<float>},
          {stats<BFloat16>, backward<BFloat16>},
          {stats<Float16>, backward<Float16>},
          {stats<double>, backward<double>}};
}

}  // namespace MEGARL_ISA
}  // namespace megarl
