// Where each local token stands: its label, its place in the unsharded batch, its sequence, and the rows that
// have a label. Computed on the device, so nothing waits for the host.
#pragma once

#include <cstdint>

namespace megarl {

// tokens [cu_seqlens[sequences]] is the whole packed batch. With context parallelism every sequence has a
// multiple of 2*cp_size tokens; it is cut into 2*cp_size chunks, and rank r holds chunks r and 2*cp_size-1-r,
// in that order. loss_mask is token-aligned (or null for all ones): row i has the label tokens[i + 1] where
// that token is in the same sequence and loss_mask[i + 1] is set, else -1. Outputs, `local` long: labels,
// positions (index into the batch), segments (sequence number); rows lists the labelled rows and is -1 after
// the first row_count[0] entries.
struct IndexArgs {
  int64_t sequences, local, cp_rank, cp_size;
  const int64_t* tokens;
  const int32_t* cu_seqlens;
  const uint8_t* loss_mask;
  int64_t *labels, *positions, *segments, *rows, *row_count;
};

void index_build_cpu(const IndexArgs& args, int threads);
void index_build_cuda(const IndexArgs& args, void* stream);

}  // namespace megarl
