// Advantages: group-relative normalisation of rewards, moments and whitening over a batch, packed GAE.
#pragma once

#include <cstdint>

namespace megarl {

// rewards float [batch, columns], advantage float [batch]. Group members need not be adjacent: `order`
// [batch] lists the sequences sorted by group, and `sorted_ids` [batch] has their groups. With
// normalize_columns, each reward column is normalised and then the columns are summed. Otherwise they are
// summed, then normalised.
struct GroupAdvantageArgs {
  int64_t batch, columns;
  const float* rewards;
  const int64_t *order, *sorted_ids;
  int mode;  // GroupMode
  double eps;
  bool normalize_columns;
  float* advantage;
};

// moments double [3] = (n, mean, m2) of the unmasked values. Values are summed in chunks of kMomentChunk, and
// the chunks are merged in order. partials is scratch, double [chunks, 3].
constexpr int64_t kMomentChunk = 4096;
struct MomentsArgs {
  int64_t tokens;
  const float* x;
  const uint8_t* mask;
  double *partials, *moments;
};

// Merges parts double [count, 3] in order into moments double [3].
struct MergeMomentsArgs {
  int64_t count;
  const double* parts;
  double* moments;
};

// out float [tokens], 0 for masked tokens. `out` may alias `x`. An infinite clip is no bound.
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

// Packed GAE. Sequence b has the tokens [cu_seqlens[b], cu_seqlens[b + 1]). Masked tokens are skipped and get
// 0. bootstrap float [sequences] is the value after the last token; null is 0. lambda float [1] or
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
