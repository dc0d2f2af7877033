// Compiled once for each instruction set; MEGARL_ISA is the namespace of this copy.
#include "rows.h"

#include <cmath>
#include <cstring>

#include "../../common/lanes.h"
#include "../../common/row_math.h"

namespace megarl {
namespace {

// With s = 1 / rms(x):  dx = s w g - x s^3 mean(w g x),  dw = sum over rows of s g x.
void rms_norm_backward(const RmsNormBackwardArgs& a, int64_t block) {
  const int64_t n = a.width, first = block * kRowsPerBlock;
  const int64_t last = first + kRowsPerBlock < a.rows ? first + kRowsPerBlock : a.rows;
  float* grad_weight = a.grad_weights + block * n;
  std::memset(grad_weight, 0, n * sizeof(float));
  for (int64_t row = first; row < last; ++row) {
    const float *x = a.x + row * n, *grad = a.grad + row * n;
    float* grad_x = a.grad_x + row * n;
    Register squares = {}, products = {};
    for (int64_t i = 0; i < n; i += kRegister) {
      const Register v = load_padded<Register>(x, i, n, 0);
      squares += v * v;
      products += v * load_padded<Register>(grad, i, n, 0) * load_padded<Register>(a.weight, i, n, 0);
    }
    const float width = static_cast<float>(n);
    const float scale = 1.0f / std::sqrt(horizontal_sum<float, kRegister>(squares) / width + a.eps);
    const float pull = horizontal_sum<float, kRegister>(products) / width * scale * scale * scale;
    for (int64_t i = 0; i < n; i += kRegister) {
      const Register v = load_padded<Register>(x, i, n, 0), g = load_padded<Register>(grad, i, n, 0) * scale;
      store_group(grad_x, i, n, g * load_padded<Register>(a.weight, i, n, 0) - v * pull);
      store_group(grad_weight, i, n, load_padded<Register>(grad_weight, i, n, 0) + g * v);
    }
  }
}

// With s = sigmoid(gate):  d gate = g up s (1 + gate (1 - s)),  d up = g gate s.
void silu_mul_backward(const SiluMulBackwardArgs& a, int64_t row) {
  const int64_t n = a.width;
  const float *gate = a.gate_up + row * 2 * n, *up = gate + n, *grad = a.grad + row * n;
  float *grad_gate = a.grad_gate_up + row * 2 * n, *grad_up = grad_gate + n;
  for (int64_t i = 0; i < n; i += kRegister) {
    const Register x = load_padded<Register>(gate, i, n, 0), g = load_padded<Register>(grad, i, n, 0);
    Register w = x * -static_cast<float>(kLog2E);
    w = w > 126.0f ? Register{} + 126.0f : w;  // the limit of exp2_lanes; the gradient is 0 there
    const Register e = exp2_lanes<6>(w), s = 1.0f / (1.0f + e);
    store_group(grad_gate, i, n, g * load_padded<Register>(up, i, n, 0) * s * (1.0f + x * (e * s)));
    store_group(grad_up, i, n, g * x * s);
  }
}

void rotate(const RotateArgs& a, int64_t row) {
  const int64_t half = a.dim / 2;
  const float *cos = a.cos_sin + row * a.dim, *sin = cos + half;
  const float sign = a.back ? -1.0f : 1.0f;
  for (int64_t h = row * a.heads; h < (row + 1) * a.heads; ++h) {
    const float *low = a.x + h * a.dim, *high = low + half;
    float* __restrict out_low = a.out + h * a.dim, * __restrict out_high = out_low + half;
    for (int64_t i = 0; i < half; ++i) {
      const float s = sin[i] * sign;
      out_low[i] = low[i] * cos[i] - high[i] * s;
      out_high[i] = high[i] * cos[i] + low[i] * s;
    }
  }
}

}  // namespace

namespace MEGARL_ISA {

LayerKernels layer_kernels() {
  return {rms_norm_backward, silu_mul_backward, rotate};
}

}  // namespace MEGARL_ISA
}  // namespace megarl
