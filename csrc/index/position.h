// The place of one local token, shared by CPU and CUDA.
#pragma once

#include "../common/types.h"
#include "api.h"

namespace megarl {

// The sequence that holds local token `i`: the last b with cu_seqlens[b] / cp_size <= i.
MEGARL_HD int64_t segment_of(const IndexArgs& a, int64_t i) {
  int64_t low = 0, high = a.sequences;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (a.cu_seqlens[middle] / a.cp_size <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

MEGARL_HD void place_token(const IndexArgs& a, int64_t i) {
  const int64_t b = segment_of(a, i);
  const int64_t begin = a.cu_seqlens[b], end = a.cu_seqlens[b + 1];
  int64_t position = i;
  if (a.cp_size > 1) {
    const int64_t half = (end - begin) / (2 * a.cp_size), offset = i - begin / a.cp_size;
    position = begin + (offset < half ? a.cp_rank * half + offset
                                      : (2 * a.cp_size - 1 - a.cp_rank) * half + offset - half);
  }
  const int64_t next = position + 1;
  const bool labelled = next < end && (!a.loss_mask || a.loss_mask[next]);
  a.labels[i] = labelled ? a.tokens[next] : -1;
  a.positions[i] = position;
  a.segments[i] = b;
}

}  // namespace megarl
