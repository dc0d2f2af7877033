// Group-relative advantages and mergeable moments, written once for CPU and CUDA. All sums are in double.
#pragma once

#include <cmath>

#include "types.h"

namespace megarl {

// The codes are shared with megarl/ops/advantage.py.
enum class GroupMode : int { kMeanStd = 0, kMean = 1, kLeaveOneOut = 2 };

// One reward of a group of n, given the group's mean and its sample standard deviation.
//   kMeanStd:     (r - mean) / (std + eps)                                        (GRPO)
//   kMean:        r - mean                                                        (Dr. GRPO)
//   kLeaveOneOut: r - mean of the others = n/(n - 1) (r - mean)                   (RLOO)
// A group of one has nothing to compare with: 0.
MEGARL_HD double group_relative(double r, double mean, double std, double n, GroupMode mode, double eps) {
  const double centred = r - mean;
  if (n < 2) return centred * 0;  // NaN stays visible
  if (mode == GroupMode::kMeanStd) return centred / (std + eps);
  if (mode == GroupMode::kMean) return centred;
  return centred * n / (n - 1);
}

// Count, mean and sum of squared distances from the mean.
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

}  // namespace megarl
