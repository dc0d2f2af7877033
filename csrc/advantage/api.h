// Advantages: group-relative normalisation of rewards, moments and whitening over a batch, packed GAE.
#pragma once

#include <cstdint>

namespace megarl {

// rewards float [batch, columns]. Group members need not be adjacent: `order` [batch] lists sequences sorted
// by group and `sorted_ids` [batch] their groups. advantage float [batch]. normalize_columns: each reward
// column is normalised, then the columns are summed; else summed, then normalised.
struct GroupAdvantageArgs {
  int64_t batch, columns;
  const float* rewards;
  const int64_t *order, *sorted_ids;
  int mode;  // GroupMode
  double eps;
  bool normalize_columns;
  float* advantage;
};

// moments double [3] = (n, mean, m2) of the unmasked values. Values are summed in chunks of kMomentChunk,
// merged in order; partials: double [chunks, 3] of scratch.
constexpr int64_t kMomentChunk = 4096;
struct MomentsArgs {
  int64_t tokens;
  const float* x;
  const uint8_t* mask;
  double *partials, *moments;
};

// parts double [count, 3] -> moments double [3], merged in order.
struct MergeMomentsArgs {
  int64_t count;
  const double* parts;
  double* moments;
};

// out float [tokens]; masked tokens get 0. `out` may be `x`. clip: infinity for none.
struct WhitenArgs {
  int64_t tokens;
  const float* x;
  const uint8_t* mask;
  const double* moments;
  double eps;
  bool keep_mean;
  double clip;
  float* out;
};

// Packed GAE: tokens of sequence b are [cu_seqlens[b], cu_seqlens[b + 1]). Masked tokens are passed over and
// get 0. bootstrap float [sequences] is the value after the last token, or null for 0. lambda float [1] or
// [sequences].
struct GaeArgs {
  int64_t sequences;
  const float *rewards, *values;
  const uint8_t* mask;
  const int32_t* cu_seqlens;
  const float* bootstrap;
  double gamma;
  const float* lambda;
  int64_t lambda_stride;
  float *advantages, *returns;
};

void group_advantage_cpu(const GroupAdvantageArgs& args, int threads);
void moments_cpu(const MomentsArgs& args, int threads);
void merge_moments_cpu(const MergeMomentsArgs& args, int threads);
void whiten_cpu(const WhitenArgs& args, int threads);
void gae_cpu(const GaeArgs& args, int threads);

void group_advantage_cuda(const GroupAdvantageArgs& args, void* stream);
void moments_cuda(const MomentsArgs& args, void* stream);
void merge_moments_cuda(const MergeMomentsArgs& args, void* stream);
void whiten_cuda(const WhitenArgs& args, void* stream);
void gae_cuda(const GaeArgs& args, void* stream);

}  // namespace megarl
