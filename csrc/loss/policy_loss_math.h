// The policy loss of one token and its derivatives, written once for CPU and CUDA.
#pragma once

#include <cmath>

#include "../common/types.h"

namespace megarl {

// The codes are shared with megarl/ops/loss.py.
enum class Objective : int { kClip = 0, kCispo = 1 };
enum class KlEstimator : int { kNone = 0, kK1 = 1, kK2 = 2, kK3 = 3 };
enum class Correction : int { kNone = 0, kTruncate = 1, kMask = 2 };

struct PolicyLossSettings {
  int objective;
  bool sequence_ratio;
  double clip_low, clip_high;
  double dual_clip;  // 0 is off
  int kl_estimator;
  double kl_coef;
  int correction;
  double correction_low, correction_high;
  double entropy_coef;
};

// Sums over the unmasked tokens, in double. The entries from kFirstMax on are maxima instead.
// The order is shared with POLICY_LOSS_SUMS of megarl/ops/loss.py.
enum LossSum : int {
  kTokens,
  kLoss,
  kPolicyLoss,
  kReferenceKl,
  kEntropy,
  kRatio,
  kClippedLow,
  kClippedHigh,
  kDualClipped,
  kApproxKl,
  kCorrectionWeight,
  kCorrected,
  kFirstMax,
  kRatioMax = kFirstMax,
  kCorrectionMax,
  kLossSums
};

// Bound on the magnitude of log-ratios before exp. e^20 is 5e8, so nothing overflows.
constexpr double kLogRatioLimit = 20;

template <class T>
MEGARL_HD T bounded(T x) {
  const T limit = T(kLogRatioLimit);
  return x > limit ? limit : x < -limit ? -limit : x;
}

template <class T>
MEGARL_HD bool within(T x) {
  return x >= T(-kLogRatioLimit) && x <= T(kLogRatioLimit);
}

template <class T>
struct TokenLoss {
  T loss;
  T d_logprob;  // derivative by this token's log-prob with the ratio fixed
  T d_ratio;    // derivative by the log-ratio of this token, or of its sequence
};

// KL(policy || reference) estimated from one sample, with r = ref - logprob (Schulman, "Approximating KL
// divergence"):
//   k1 = -r,  k2 = r^2 / 2,  k3 = e^r - 1 - r.
// `slope` gets the derivative by logprob.
template <class T>
MEGARL_HD T kl_estimate(T r, int estimator, T* slope) {
  if (estimator == static_cast<int>(KlEstimator::kK1)) {
    *slope = 1;
    return -r;
  }
  if (estimator == static_cast<int>(KlEstimator::kK2)) {
    *slope = -r;
    return r * r / 2;
  }
  const T b = bounded(r);
  const T excess = static_cast<T>(expm1(b));
  *slope = within(r) ? -excess : T(0);
  return excess - b;
}

// Loss of one unmasked token; adds its metrics to sums[kLossSums]. `log_ratio` is log(policy/old) of the
// token or of its sequence. The objective, with ratio r and advantage A:
//   clip:   max(-A r, -A clip(r, 1 - low, 1 + high)); with dual clip c at most -A c for A < 0     (PPO, DAPO)
//   cispo:  -A clip(r, 1 - low, 1 + high) logprob, with the clipped ratio fixed                   (CISPO)
// times a correction by w = old/rollout:
//   truncate: min(w, high)                                                                        (TIS)
//   mask:     w if low <= w <= high, else 0                                                       (IcePop)
// plus kl_coef KL(policy || reference) - entropy_coef entropy.
template <class T>
MEGARL_HD TokenLoss<T> token_loss(const PolicyLossSettings& s, T logprob, T log_ratio, T old, T advantage,
                                  const T* ref, const T* rollout, const T* entropy, double* sums) {
  const T raw = log_ratio, bound = bounded(raw), ratio = static_cast<T>(exp(bound));
  const T low = T(1 - s.clip_low), high = T(1 + s.clip_high);
  const T clipped = ratio < low ? low : ratio > high ? high : ratio;
  TokenLoss<T> out{0, 0, 0};
  bool cut = false, dual = false;
  if (s.objective == static_cast<int>(Objective::kCispo)) {
    out.loss = -advantage * clipped * logprob;
    out.d_logprob = -advantage * clipped;
    cut = clipped != ratio;
  } else {
    const T free_loss = -advantage * ratio, clip_loss = -advantage * clipped;
    cut = clip_loss > free_loss;
    out.loss = cut ? clip_loss : free_loss;
    if (s.dual_clip > 0 && advantage < 0 && out.loss > -advantage * T(s.dual_clip)) {
      out.loss = -advantage * T(s.dual_clip);
      dual = true;
    }
    if (!cut && !dual && within(raw)) out.d_ratio = free_loss;
  }
  double weight = 1, corrected = 0;
  if (s.correction != static_cast<int>(Correction::kNone)) {
    const T w = static_cast<T>(exp(bounded(old - *rollout)));
    weight = w;
    const bool above = weight > s.correction_high, below = weight < s.correction_low;
    if (s.correction == static_cast<int>(Correction::kTruncate)) {
      corrected = above;
      if (above) weight = s.correction_high;
    } else if (above || below) {
      corrected = 1;
      weight = 0;
    }
    out.loss *= T(weight);
    out.d_logprob *= T(weight);
    out.d_ratio *= T(weight);
  }
  sums[kTokens] += 1;
  sums[kPolicyLoss] += out.loss;
  if (s.kl_estimator != static_cast<int>(KlEstimator::kNone)) {
    T slope = 0;
    const T kl = kl_estimate(*ref - logprob, s.kl_estimator, &slope);
    out.loss += T(s.kl_coef) * kl;
    out.d_logprob += T(s.kl_coef) * slope;
    sums[kReferenceKl] += kl;
  }
  if (entropy) {
    out.loss -= T(s.entropy_coef) * *entropy;
    sums[kEntropy] += *entropy;
  }
  sums[kLoss] += out.loss;
  sums[kRatio] += ratio;
  sums[kClippedLow] += cut && ratio < low;
  sums[kClippedHigh] += cut && ratio > high;
  sums[kDualClipped] += dual;
  sums[kApproxKl] += expm1(static_cast<double>(bound)) - bound;  // k3 of KL(old || policy)
  sums[kCorrectionWeight] += weight;
  sums[kCorrected] += corrected;
  if (ratio > sums[kRatioMax]) sums[kRatioMax] = ratio;
  if (weight > sums[kCorrectionMax]) sums[kCorrectionMax] = weight;
  return out;
}

// Adds the sums of a disjoint set of tokens.
MEGARL_HD void add_sums(double* into, const double* from) {
  for (int k = 0; k < kFirstMax; ++k) into[k] += from[k];
  for (int k = kFirstMax; k < kLossSums; ++k) into[k] = from[k] > into[k] ? from[k] : into[k];
}

}  // namespace megarl
