// The math of one softmax row, written once for CPU and CUDA.
//
// A part of a row is summed up by three numbers in raw-logit units, with T the temperature:
//   max = max x,   sum = sum e,   dot = sum e*u,   where u = (x - max)/T and e = exp(u).
// Log-prob of label y: (x_y - max)/T - log(sum).  Entropy: log(sum) - dot/sum.
// The log-sum-exp itself is never stored: at logits near 1e4 it would lose the digits that matter.
#pragma once

#include <cmath>

#include "types.h"

namespace megarl {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

template <class A>
MEGARL_HD A negative_infinity() {
  return static_cast<A>(-INFINITY);
}

template <class A>
struct RowStats {
  A max;
  A sum;
  A dot;
};

template <class A>
MEGARL_HD RowStats<A> empty_stats() {
  return {negative_infinity<A>(), A(0), A(0)};
}

// Re-expresses the sums against a new maximum `top >= s.max`.
template <class A>
MEGARL_HD RowStats<A> rescale(RowStats<A> s, A top, A inv_temp) {
  if (s.max == top) return s;
  if (s.max == negative_infinity<A>())
    return {top, s.sum, s.dot};  // sum is 0, or NaN where the row holds one
  const A shift = (s.max - top) * inv_temp;
  const A factor = static_cast<A>(exp(shift));
  if (factor == A(0)) return {top, s.sum * factor, s.dot * factor};  // spares 0 * -inf
  return {top, s.sum * factor, (s.dot + shift * s.sum) * factor};
}

// Statistics of the union of two disjoint parts of a row.
template <class A>
MEGARL_HD RowStats<A> merge(const RowStats<A>& a, const RowStats<A>& b, A inv_temp) {
  const A top = b.max > a.max ? b.max : a.max;
  const RowStats<A> x = rescale(a, top, inv_temp), y = rescale(b, top, inv_temp);
  return {top, x.sum + y.sum, x.dot + y.dot};
}

// What the backward pass needs of a row, and the results of the forward pass.
template <class A>
struct RowResult {
  A logprob, entropy, log_sum;
};

// In double: a temperature rounded to float would cost digits of log-probs far from 0.
template <class A>
MEGARL_HD RowResult<A> finish_row(const RowStats<A>& s, A label_logit, double inv_temp) {
  const double log_sum = log(static_cast<double>(s.sum));
  const double gap = static_cast<double>(label_logit) - s.max;
  return {static_cast<A>(gap * inv_temp - log_sum), static_cast<A>(log_sum - s.dot / s.sum),
          static_cast<A>(log_sum)};
}

// The coefficients of one row's gradient. With w = log2(p) of a column:
//   d loss / d x = [-p (g + h (log p + H)) + g 1{y}] / T = -p (base + slope w) + g/T 1{y}
// where g and h are the gradients of log-prob and entropy.
template <class A>
struct RowGradient {
  A max, scale, log2_sum;  // w = (x - max) * scale - log2_sum
  A base, slope, label;
};

template <class A>
MEGARL_HD RowGradient<A> row_gradient(A max, A log_sum, A entropy, A g, A h, A inv_temp) {
  return {max,
          inv_temp * A(kLog2E),
          log_sum * A(kLog2E),
          (g + h * entropy) * inv_temp,
          h * A(kLn2) * inv_temp,
          g * inv_temp};
}

// V is the accumulator on CUDA and a vector of it on CPU.
template <class V, class A>
MEGARL_HD V gradient_element(V p, V w, const RowGradient<A>& k) {
  return -p * (k.base + k.slope * w);
}

}  // namespace megarl
