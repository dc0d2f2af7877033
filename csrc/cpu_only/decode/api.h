// What a decode step on CPU does between its matrix products: norms, rotary embedding, attention over a paged
// key/value cache, the gated activation, sampling. float32, attention in the 16-bit floats too. SGLang has
// its own kernels on a GPU.
#pragma once

#include <cstdint>

namespace megarl {

// residual [rows, width] += update (null: nothing); out = residual / rms(residual) * weight.
struct AddNormArgs {
  int64_t rows, width;
  const float *update, *weight;
  float eps;
  float *residual, *out;
};

// qkv [rows, (heads + 2 kv_heads) * dim]. Queries and keys are normed by q_norm and k_norm [dim] (null: not),
// then rotated by cos_sin[positions[row]] [dim / 2 cosines, dim / 2 sines]; queries stay in qkv, keys and
// values go to row slots[row] of the caches [*, kv_heads, dim].
struct RotateStoreArgs {
  int64_t rows, heads, kv_heads, dim;
  float* qkv;
  const float *q_norm, *k_norm;
  float eps;
  const float* cos_sin;
  const int64_t *positions, *slots;
  float *keys, *values;
};

// Row i of `queries` attends to the tokens 0..positions[i] of request requests[i], or the last `window` of
// them (0: all); token j lies in row table[requests[i] * table_stride + j] of the caches. Strides count
// elements from row to row. Sums are taken in float.
struct PagedAttentionArgs {
  int dtype;  // of queries, keys, values and out: float32, bfloat16 or float16
  int64_t rows, heads, kv_heads, dim;
  const void* queries;
  int64_t query_stride;
  const void *keys, *values;
  const int32_t* table;
  int64_t table_stride;
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

// A token of each row of logits [rows, vocab], drawn by uniform[row] in [0, 1) from softmax(logits /
// temperature[row]), and its log-prob there. The logits are overwritten. A row without a finite sum of
// probabilities gives token 0 and NaN.
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
