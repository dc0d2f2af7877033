// Operations between the matrix products of a generation step on CPU: norms, rotary embedding, attention over
// a paged KV cache, the gated activation, sampling. They take float32; attention also takes the 16-bit
// floats. On a GPU, SGLang has its own kernels.
#pragma once

#include <cstdint>

namespace megarl {

// residual [rows, width] += update, unless null; out = residual / rms(residual) * weight.
struct AddNormArgs {
  int64_t rows, width;
  const float *update, *weight;
  float eps;
  float *residual, *out;
};

// qkv [rows, (heads + 2 kv_heads) * dim]. Queries and keys are normalised by q_norm and k_norm [dim], unless
// null, then rotated by cos_sin[positions[row]] [dim / 2 cosines, dim / 2 sines]. Queries stay in qkv. Keys
// and values go to row slots[row] of the caches [num_slots, kv_heads, dim]. Indices are checked.
struct RotateStoreArgs {
  int64_t rows, heads, kv_heads, dim;
  float* qkv;
  const float *q_norm, *k_norm;
  float eps;
  const float* cos_sin;
  const int64_t *positions, *slots;
  int64_t num_positions, num_slots;
  float *keys, *values;
};

// Row i of `queries` attends to the tokens 0..positions[i] of request requests[i], or only to the last
// `window` of them (0: all). Token j is in row table[requests[i] * table_width + j] of the caches [num_slots,
// kv_heads, dim]. Strides are in elements from row to row. Sums are in float. Indices are checked.
struct PagedAttentionArgs {
  int dtype;  // DType of queries, keys, values and out: float32, bfloat16 or float16
  int64_t rows, heads, kv_heads, dim;
  const void* queries;
  int64_t query_stride;
  const void *keys, *values;
  const int32_t* table;
  int64_t num_requests, table_width, num_slots;
  const int64_t *requests, *positions;
  int64_t window;
  float scale;
  void* out;  // [rows, heads * dim]
};

// out [rows, width] = silu(gate) * up of gate_up [rows, 2 * width].
struct SiluMulArgs {
  int64_t rows, width;
  const float* gate_up;
  float* out;
};

// Samples a token per row of logits [rows, vocab] from softmax(logits / temperature[row]), by uniform[row] in
// [0, 1), and computes its log-prob. Overwrites the logits. A row without a finite sum of probabilities gives
// token 0 and NaN.
struct SampleArgs {
  int64_t rows, vocab;
  float* logits;
  const float* temperature;
  const double* uniform;
  int32_t* tokens;
  float* logprobs;
};

void add_norm_cpu(const AddNormArgs& args, int threads);
void rotate_store_cpu(const RotateStoreArgs& args, int threads);
void paged_attention_cpu(const PagedAttentionArgs& args, int threads);
void silu_mul_cpu(const SiluMulArgs& args, int threads);
void sample_cpu(const SampleArgs& args, int threads);

}  // namespace megarl
