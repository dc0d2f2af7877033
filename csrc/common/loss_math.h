// The policy loss of one token and its derivatives, written once for CPU and CUDA.
#pragma once

#include <cmath>

#include "types.h"

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

// What is summed over the unmasked tokens, in double; the entries from kFirstMax on take the maximum instead.
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

// Log-ratios are held within this distance of 0 before exp: e^20 is 5e8, and no overflow can follow.
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
  T d_logprob;  // derivative by this token's log-prob, the ratio held fixed
  T d_ratio;    // derivative by the log of the ratio: this token's, or its sequence's
};

// KL(policy || reference) estimated from one sample, with r = ref - logprob (Schulman, "Approximating KL
// divergence"):
//   k1 = -r,  k2 = r^2 / 2,  k3 = e^r - 1 - r.     `slope` gets the derivative by logprob.
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

// One unmasked token. `log_ratio` is log(policy/old), of the token or of its sequence. Adds to
// sums[kLossSums].
//   clip:   max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 no more than -A c        (PPO, DAPO; dual
//   clip) cispo:  -A clip(r, 1 - low, 1 + high) logprob, the clipped ratio held fixed          (CISPO)
// times the weight w = old/rollout, min(w, high) or w where low <= w <= high and else 0    (TIS, IcePop)
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

// Sums of two disjoint sets of tokens.
MEGARL_HD void add_sums(double* into, const double* from) {
  for (int k = 0; k < kFirstMax; ++k) into[k] += from[k];
  for (int k = kFirstMax; k < kLossSums; ++k) into[k] = from[k] > into[k] ? from[k] : into[k];
}

}  // namespace megarl
