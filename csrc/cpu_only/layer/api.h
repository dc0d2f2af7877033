// Operations between the matrix products of a layer in training on CPU, float32: the gradients of RMSNorm and
// the gated activation, whose forward is in csrc/cpu_only/decode, and the rotary embedding with its gradient.
#pragma once

#include <cstdint>

namespace megarl {

// Rows in a block, over which a weight's gradient is summed at once. A fixed size fixes the order of the sum,
// for any number of threads.
constexpr int64_t kRowsPerBlock = 64;

// Gradient of y = x / rms(x) * weight, x [rows, width]; grad [rows, width] is the gradient of y. grad_weights
// is [blocks, width], one row per kRowsPerBlock rows, which the caller sums.
struct RmsNormBackwardArgs {
  int64_t rows, width;
  const float *x, *weight;
  float eps;
  const float* grad;
  float *grad_x, *grad_weights;
};

// Gradient of y = silu(gate) * up, gate_up [rows, 2 * width]; grad [rows, width] is the gradient of y.
struct SiluMulBackwardArgs {
  int64_t rows, width;
  const float *gate_up, *grad;
  float* grad_gate_up;
};

// Rotates the halves of each head of x by cos_sin [rows, dim / 2 cosines, dim / 2 sines] into out [rows,
// heads, dim]. `back` rotates by the negative angle, which is the gradient.
struct RotateArgs {
  int64_t rows, heads, dim;
  const float *x, *cos_sin;
  bool back;
  float* out;
};

void rms_norm_backward_cpu(const RmsNormBackwardArgs& args, int threads);
void silu_mul_backward_cpu(const SiluMulBackwardArgs& args, int threads);
void rotate_cpu(const RotateArgs& args, int threads);

}  // namespace megarl
