// Causal attention over packed sequences on CPU, float32, with its gradient.
//
// Sequence s is the tokens rows[cu_seqlens[s]] .. rows[cu_seqlens[s + 1] - 1], in order; sequences may have
// tokens in common. Its first skipped[s] tokens are keys alone: another sequence has their queries. Queries
// are [tokens, heads, dim], keys and values [tokens, kv_heads, dim], each head of which serves heads /
// kv_heads.
#pragma once

#include <cstdint>

namespace megarl {

struct PackedAttentionShape {
  int64_t sequences, heads, kv_heads, dim;
  const int32_t* cu_seqlens;
  const int64_t *rows, *skipped;
  float scale;  // of the scores before the softmax
  const float *query, *key, *value;
};

// log_sums [tokens, heads]: of the exponentials of each row's scores.
struct PackedAttentionArgs {
  PackedAttentionShape shape;
  float *out, *log_sums;
};

// grad [tokens, heads, dim] is that of out. Gradients of keys and values come apart for each sequence, [rows,
// kv_heads, dim], so that sequences share no sum.
struct PackedAttentionBackwardArgs {
  PackedAttentionShape shape;
  const float *log_sums, *grad;
  float *grad_query, *grad_keys, *grad_values;
};

void packed_attention_cpu(const PackedAttentionArgs& args, int threads);
void packed_attention_backward_cpu(const PackedAttentionBackwardArgs& args, int threads);

}  // namespace megarl
