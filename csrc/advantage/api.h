// Advantages: group-relative normalisation of rewards.
#pragma once

#include <cstdint>

namespace megarl {

// rewards float [batch, columns]. Group members need not be adjacent: `order` [batch] lists sequences sorted by
// group and `sorted_ids` [batch] their groups. advantage float [batch].
// normalize_columns: each reward column is normalised, then the columns are summed; else summed, then normalised.
struct GroupAdvantageArgs {
  int64_t batch, columns;
  const float* rewards;
  const int64_t *order, *sorted_ids;
  int mode;  // GroupMode
  double eps;
  bool normalize_columns;
  float* advantage;
};

void group_advantage_cpu(const GroupAdvantageArgs& args, int threads);
void group_advantage_cuda(const GroupAdvantageArgs& args, void* stream);

}  // namespace megarl
