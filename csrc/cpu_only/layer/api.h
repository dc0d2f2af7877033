// What a layer does between its matrix products in training on CPU, float32: gradients of the operations
// whose values csrc/decode computes, and the rotary embedding with its own.
#pragma once

#include <cstdint>

namespace megarl {

// Rows whose share of a weight's gradient is added up in one go. Other than the number of threads it is
// fixed, so that the sum's order is.
constexpr int64_t kRowsPerBlock = 64;

// Of y = x / rms(x) * weight, x [rows, width], with grad [rows, width] that of y. grad_weights is
// [blocks, width], a row for each kRowsPerBlock rows, to be summed by the caller.
struct RmsNormBackwardArgs {
  int64_t rows, width;
  const float *x, *weight;
  float eps;
  const float* grad;
  float *grad_x, *grad_weights;
};

// Of y = silu(gate) * up with gate_up [rows, 2 * width], grad [rows, width] that of y.
struct SiluMulBackwardArgs {
  int64_t rows, width;
  const float *gate_up, *grad;
  float* grad_gate_up;
};

// out [rows, heads, dim]: the halves of each head of x rotated into each other by cos_sin [rows, dim / 2
// cosines, dim / 2 sines], or back, which is the gradient.
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
