// Causal attention over packed sequences on CPU, float32, with its gradient.
//
// Sequence s has the tokens rows[cu_seqlens[s]] .. rows[cu_seqlens[s + 1] - 1], in order. Sequences can share
// tokens: the first skipped[s] tokens of s act only as keys, and another sequence has their queries. Queries
// are [tokens, heads, dim], keys and values [tokens, kv_heads, dim]. heads / kv_heads heads share a head of
// keys and values.
#pragma once

#include <cstdint>

namespace megarl {

struct PackedAttentionShape {
  int64_t sequences, heads, kv_heads, dim;
  const int32_t* cu_seqlens;
  const int64_t *rows, *skipped;
  float scale;  // factor of the scores before the softmax
  const float *query, *key, *value;
};

// log_sums [tokens, heads]: log2 of the sum of the exponentials of each row's scores.
struct PackedAttentionArgs {
  PackedAttentionShape shape;
  float *out, *log_sums;
};

// grad [tokens, heads, dim] is the gradient of out. grad_keys and grad_values are [rows, kv_heads, dim]: each
// sequence has its own rows, so that no two sequences add to one sum.
struct PackedAttentionBackwardArgs {
  PackedAttentionShape shape;
  const float *log_sums, *grad;
  float *grad_query, *grad_keys, *grad_values;
};

void packed_attention_cpu(const PackedAttentionArgs& args, int threads);
void packed_attention_backward_cpu(const PackedAttentionBackwardArgs& args, int threads);

}  // namespace megarl
