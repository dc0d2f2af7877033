// Log-prob and entropy of labels under logits or a vocabulary shard of them: statistics, merge over ranks,
// gradient. The CPU and CUDA sides take the same arguments. A kernel only reads and writes the given memory
// and allocates none.
#pragma once

#include <cstdint>

namespace megarl {

// `rows` rows of `columns` logits, with a stride of `row_stride` elements. The first `valid` columns are
// vocabulary, the rest padding. Column c is vocabulary entry `vocab_start + c`.
struct LogitRows {
  int64_t rows, columns, valid, row_stride, vocab_start;
  int dtype;  // DType; statistics are float, or double for double logits
};

// stats [rows, 4] = (max, sum, dot, label logit) of row_math.h. The label logit is NaN if the label is in
// another shard. Rows with label -1 are not read and get zeros. inv_temp (1/temperature) is double [1] or
// [rows], with `temp_stride` 0 or 1. dot is 0 unless `with_entropy`.
struct StatsArgs {
  LogitRows shape;
  const void* logits;
  const int64_t* labels;
  const double* inv_temp;
  int64_t temp_stride;
  bool with_entropy;
  void* stats;
};

// Merges stats [ranks, rows, 4] in rank order into logprob [rows], entropy [rows] and context [rows, 3] =
// (max, log sum, entropy). Rows with label -1 get zeros. A label outside all shards gives NaN.
struct MergeArgs {
  int64_t ranks, rows;
  int dtype;  // kFloat32 or kFloat64
  const void* stats;
  const int64_t* labels;
  const double* inv_temp;
  int64_t temp_stride;
  void *logprob, *entropy, *context;
};

// Statistics and their merge in one pass, of rows whose whole vocabulary is here. The outputs are MergeArgs';
// null ones leave the statistics instead.
struct RowsArgs {
  StatsArgs stats;
  void *logprob, *entropy, *context;
};

// grad [rows, columns] from the gradients of log-prob and entropy; the latter may be null. `grad` may alias
// `logits`. Rows with label -1, rows with both gradients 0, and padding columns get zeros and are not read.
struct BackwardArgs {
  LogitRows shape;
  const void* logits;
  void* grad;
  int64_t grad_stride;
  const int64_t* labels;
  const double* inv_temp;
  int64_t temp_stride;
  const void *context, *grad_logprob, *grad_entropy;
};

void logprob_stats_cpu(const StatsArgs& args, int threads);
void logprob_rows_cpu(const RowsArgs& args, int threads);
void logprob_merge_cpu(const MergeArgs& args, int threads);
void logprob_backward_cpu(const BackwardArgs& args, int threads);

void logprob_stats_cuda(const StatsArgs& args, void* stream);
void logprob_rows_cuda(const RowsArgs& args, void* stream);
void logprob_merge_cuda(const MergeArgs& args, void* stream);
void logprob_backward_cuda(const BackwardArgs& args, void* stream);

}  // namespace megarl
