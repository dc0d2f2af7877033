// The math of one softmax row, written once for CPU and CUDA.
//
// Three numbers in raw-logit units describe a part of a row. T is the temperature:
//   max = max x,   sum = sum e,   dot = sum e*u,   where u = (x - max)/T and e = exp(u).
// Log-prob of label y: (x_y - max)/T - log(sum).  Entropy: log(sum) - dot/sum.
// The log-sum-exp itself is never stored: at logits near 1e4 it would lose the significant digits.
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

// Rescales the sums to a new maximum `top >= s.max`.
template <class A>
MEGARL_HD RowStats<A> rescale(RowStats<A> s, A top, A inv_temp) {
  if (s.max == top) return s;
  if (s.max == negative_infinity<A>()) return {top, s.sum, s.dot};  // sum is 0, or NaN if the row has one
  const A shift = (s.max - top) * inv_temp;
  const A factor = static_cast<A>(exp(shift));
  if (factor == A(0)) return {top, s.sum * factor, s.dot * factor};  // avoids 0 * -inf
  return {top, s.sum * factor, (s.dot + shift * s.sum) * factor};
}

// Statistics of the union of two disjoint parts of a row.
template <class A>
MEGARL_HD RowStats<A> merge(const RowStats<A>& a, const RowStats<A>& b, A inv_temp) {
  const A top = b.max > a.max ? b.max : a.max;
  const RowStats<A> x = rescale(a, top, inv_temp), y = rescale(b, top, inv_temp);
  return {top, x.sum + y.sum, x.dot + y.dot};
}

// Results of the forward pass for a row; backward needs entropy and log_sum.
template <class A>
struct RowResult {
  A logprob, entropy, log_sum;
};

// Computes in double: a temperature rounded to float would lose digits of log-probs far from 0.
template <class A>
MEGARL_HD RowResult<A> finish_row(const RowStats<A>& s, A label_logit, double inv_temp) {
  const double log_sum = log(static_cast<double>(s.sum));
  const double gap = static_cast<double>(label_logit) - s.max;
  return {static_cast<A>(gap * inv_temp - log_sum), static_cast<A>(log_sum - s.dot / s.sum),
          static_cast<A>(log_sum)};
}

// Coefficients of one row's gradient. With w = log2(p) of a column:
//   d loss / d x = [-p (g + h (log p + H)) + g 1{y}] / T = -p (base + slope w) + g/T 1{y}
// where g and h are the gradients by log-prob and entropy.
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

// V is the accumulator type on CUDA and a vector of it on CPU.
template <class V, class A>
MEGARL_HD V gradient_element(V p, V w, const RowGradient<A>& k) {
  return -p * (k.base + k.slope * w);
}

}  // namespace megarl
