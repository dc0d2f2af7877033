// Reads the inputs and writes the results of one token of the policy loss; shared by CPU and CUDA.
#pragma once

#include "api.h"

namespace megarl {

// Returns the last sequence that begins at or before token `t`.
MEGARL_HD int64_t sequence_of(const int32_t* cu_seqlens, int64_t sequences, int64_t t) {
  int64_t low = 0, high = sequences;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (cu_seqlens[middle] <= t) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class T>
MEGARL_HD const T* at(const void* base, int64_t t) {
  return base ? static_cast<const T*>(base) + t : nullptr;
}

template <class T>
MEGARL_HD void policy_loss_token(const PolicyLossArgs& a, int64_t t, double* sums) {
  TokenLoss<T> out{0, 0, 0};
  if (a.mask[t]) {
    const T logprob = *at<T>(a.logprob, t), old = *at<T>(a.old, t);
    const T log_ratio = a.sequence_ratio ? *at<T>(a.sequence_ratio, sequence_of(a.cu_seqlens, a.sequences, t))
                                         : logprob - old;
    out = token_loss<T>(a.settings, logprob, log_ratio, old, *at<T>(a.advantage, t), at<T>(a.ref, t),
                        at<T>(a.rollout, t), at<T>(a.entropy, t), sums);
  }
  static_cast<T*>(a.loss)[t] = out.loss;
  static_cast<T*>(a.d_logprob)[t] = a.d_ratio ? out.d_logprob : out.d_logprob + out.d_ratio;
  if (a.d_ratio) static_cast<T*>(a.d_ratio)[t] = out.d_ratio;
}

}  // namespace megarl
