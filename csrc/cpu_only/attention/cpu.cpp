#include <vector>

#include "../../common/isa.h"
#include "../../common/parallel.h"
#include "rows.h"

namespace megarl {
namespace {

const AttentionKernels& kernels() {
  static const AttentionKernels best_copy = MEGARL_BEST_COPY(attention_kernels)();
  return best_copy;
}

// Calls work(sequence, kv_head, scratch) for each sequence and head of keys and values. `floats` is the size
// of the scratch, from the sequence's length and the head's dim.
template <class Work>
void for_each_part(const PackedAttentionShape& s, int64_t (*floats)(int64_t, int64_t), int threads,
                   const Work& work) {
  const int64_t mean = s.sequences ? s.cu_seqlens[s.sequences] / s.sequences : 0;
  parallel_for(s.sequences * s.kv_heads, mean * mean * s.heads / s.kv_heads * s.dim, threads, [&](int64_t i) {
    thread_local std::vector<float> scratch;
    const int64_t sequence = i / s.kv_heads;
    const int64_t length = s.cu_seqlens[sequence + 1] - s.cu_seqlens[sequence];
    const size_t needed = static_cast<size_t>(floats(length, s.dim));
    if (scratch.size() < needed) scratch.resize(needed);
    work(sequence, i % s.kv_heads, scratch.data());
  });
}

}  // namespace

void packed_attention_cpu(const PackedAttentionArgs& a, int threads) {
  for_each_part(
      a.shape, kernels().forward_floats, threads,
      [&](int64_t sequence, int64_t head, float* scratch) { kernels().forward(a, sequence, head, scratch); });
}

void packed_attention_backward_cpu(const PackedAttentionBackwardArgs& a, int threads) {
  for_each_part(a.shape, kernels().backward_floats, threads,
                [&](int64_t sequence, int64_t head, float* scratch) {
                  kernels().backward(a, sequence, head, scratch);
                });
}

}  // namespace megarl
