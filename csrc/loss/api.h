// Policy loss of every token with its gradient and metrics, in one pass; and sums over sequences.
#pragma once

#include <cstdint>

#include "policy_loss_math.h"

namespace megarl {

// Tensors [tokens] of `dtype` (kFloat32 or kFloat64). ref, rollout, entropy, sequence_ratio and d_ratio are
// null if not used. With sequence_ratio [sequences], the sequence's log-ratio (cu_seqlens) replaces the
// token's, and its derivative goes to d_ratio. Otherwise both derivatives go to d_logprob. Masked tokens are
// not read and get 0. Metrics are summed in chunks of kLossChunk tokens (partials double [chunks,
// kLossSums]), and the chunks in order into sums double [kLossSums].
constexpr int64_t kLossChunk = 1024;
struct PolicyLossArgs {
  int64_t tokens, sequences;
  int dtype;
  PolicyLossSettings settings;
  const void *logprob, *old, *advantage, *ref, *rollout, *entropy;
  const uint8_t* mask;
  const void* sequence_ratio;
  const int32_t* cu_seqlens;
  void *loss, *d_logprob, *d_ratio;
  double *partials, *sums;
};

// sums double [sequences, 2] = (sum of x, count) over the unmasked tokens of each sequence.
struct SegmentSumArgs {
  int64_t sequences;
  int dtype;
  const void* x;
  const uint8_t* mask;
  const int32_t* cu_seqlens;
  double* sums;
};

void policy_loss_cpu(const PolicyLossArgs& args, int threads);
void segment_sum_cpu(const SegmentSumArgs& args, int threads);

void policy_loss_cuda(const PolicyLossArgs& args, void* stream);
void segment_sum_cuda(const SegmentSumArgs& args, void* stream);

}  // namespace megarl
