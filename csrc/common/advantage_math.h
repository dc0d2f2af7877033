// Group-relative advantages, mergeable moments and the GAE recurrence, written once for CPU and CUDA.
// All sums are in double. The tensors are small, and the order of a batch then does not change the float
// results.
#pragma once

#include <cmath>

#include "types.h"

namespace megarl {

// The codes are shared with megarl/ops/advantage.py.
enum class GroupMode : int { kMeanStd = 0, kMean = 1, kLeaveOneOut = 2 };

// Advantage of one reward in a group of n, from the group's mean and sample standard deviation.
//   kMeanStd:     (r - mean) / (std + eps)                                        (GRPO)
//   kMean:        r - mean                                                        (Dr. GRPO)
//   kLeaveOneOut: r - mean of the others = n/(n - 1) (r - mean)                   (RLOO)
// A group of one has nothing to compare with and gets 0.
MEGARL_HD double group_relative(double r, double mean, double std, double n, GroupMode mode, double eps) {
  const double centred = r - mean;
  if (n < 2) return centred * 0;  // keeps NaN
  if (mode == GroupMode::kMeanStd) return centred / (std + eps);
  if (mode == GroupMode::kMean) return centred;
  return centred * n / (n - 1);
}

// Count, mean and sum of squared deviations from the mean.
struct Moments {
  double n, mean, m2;
};

// Moments of the union (Chan, Golub and LeVeque, 1979).
MEGARL_HD Moments merge(const Moments& a, const Moments& b) {
  if (a.n == 0) return b;
  if (b.n == 0) return a;
  const double n = a.n + b.n, delta = b.mean - a.mean;
  return {n, a.mean + delta * (b.n / n), a.m2 + b.m2 + delta * delta * (a.n * b.n / n)};
}

// Normalises x to sample variance 1 and, unless `keep_mean`, mean 0; then clips it to [-clip, clip].
MEGARL_HD double whiten(double x, const Moments& m, double eps, bool keep_mean, double clip) {
  const double variance = m.n > 1 ? m.m2 / (m.n - 1) : 0;
  double y = (x - m.mean) / sqrt(variance + eps);
  if (keep_mean) y += m.mean;
  return y > clip ? clip : y < -clip ? -clip : y;
}

// Generalised advantage estimation (Schulman et al., 2016), from the last token to the first:
//   A_t = r_t + gamma V_next - V_t + gamma lambda A_next
// where next is the next unmasked token. A token is an affine map of the state (A_next, V_next). Maps
// compose, so tokens can be scanned in parallel.
struct GaeState {
  double advantage, value;
};

struct GaeMap {
  double p, q, c;   // A = p A_next + q V_next + c
  bool sets_value;  // V = value, else V = V_next
  double value;
};

MEGARL_HD GaeMap gae_identity() {
  return {1, 0, 0, false, 0};
}

MEGARL_HD GaeMap gae_token(double reward, double value, double gamma, double lambda) {
  return {gamma * lambda, gamma, reward - value, true, value};
}

MEGARL_HD GaeState apply(const GaeMap& m, const GaeState& s) {
  return {m.p * s.advantage + (m.q * s.value + m.c), m.sets_value ? m.value : s.value};
}

// Composition that applies `later` first, then `earlier`: the recurrence runs backwards in time.
MEGARL_HD GaeMap compose(const GaeMap& earlier, const GaeMap& later) {
  const double known = later.sets_value ? later.value : 0;
  return {earlier.p * later.p, earlier.p * later.q + (later.sets_value ? 0 : earlier.q),
          earlier.p * later.c + earlier.q * known + earlier.c, earlier.sets_value || later.sets_value,
          earlier.sets_value ? earlier.value : later.value};
}

}  // namespace megarl
