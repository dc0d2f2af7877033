// CPU work on a row or a block of rows of a layer's activations, compiled for several instruction sets.
#pragma once

#include "api.h"

namespace megarl {

struct LayerKernels {
  void (*rms_norm_backward)(const RmsNormBackwardArgs& a, int64_t block);
  void (*silu_mul_backward)(const SiluMulBackwardArgs& a, int64_t row);
  void (*rotate)(const RotateArgs& a, int64_t row);
};

namespace baseline {
LayerKernels layer_kernels();
}
namespace avx2 {
LayerKernels layer_kernels();
}
namespace avx512 {
LayerKernels layer_kernels();
}
namespace avx512bf16 {
LayerKernels layer_kernels();
}

}  // namespace megarl
