// The advantage of one group, shared by CPU and CUDA.
#pragma once

#include "../common/advantage_math.h"
#include "api.h"

namespace megarl {

// Reward of a sequence: column `c`, or the sum of all columns if c is -1.
MEGARL_HD double reward_of(const GroupAdvantageArgs& a, int64_t sequence, int64_t c) {
  const float* row = a.rewards + sequence * a.columns;
  if (c >= 0) return row[c];
  double sum = 0;
  for (int64_t i = 0; i < a.columns; ++i) sum += row[i];
  return sum;
}

// Normalises column `c` of the group at order[begin, end). `first` sets its advantages, otherwise adds to
// them.
MEGARL_HD void add_group_column(const GroupAdvantageArgs& a, int64_t begin, int64_t end, int64_t c,
                                bool first) {
  const double n = static_cast<double>(end - begin);
  double mean = 0, m2 = 0;
  for (int64_t i = begin; i < end; ++i) mean += reward_of(a, a.order[i], c);
  mean /= n;
  for (int64_t i = begin; i < end; ++i) {
    const double centred = reward_of(a, a.order[i], c) - mean;
    m2 += centred * centred;
  }
  const double std = n > 1 ? sqrt(m2 / (n - 1)) : 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t sequence = a.order[i];
    const double value =
        group_relative(reward_of(a, sequence, c), mean, std, n, static_cast<GroupMode>(a.mode), a.eps);
    a.advantage[sequence] = static_cast<float>(first ? value : a.advantage[sequence] + value);
  }
}

// Computes the advantages of the group that begins at order[begin]; does nothing if no group begins there.
MEGARL_HD void group_at(const GroupAdvantageArgs& a, int64_t begin) {
  const int64_t id = a.sorted_ids[begin];
  if (begin > 0 && a.sorted_ids[begin - 1] == id) return;
  int64_t end = begin + 1;
  while (end < a.batch && a.sorted_ids[end] == id) ++end;
  if (!a.normalize_columns) return add_group_column(a, begin, end, -1, true);
  for (int64_t c = 0; c < a.columns; ++c) add_group_column(a, begin, end, c, c == 0);
}

}  // namespace megarl
