// CPU work on one row of a generation step, compiled for several instruction sets.
#pragma once

#include "api.h"

namespace megarl {

struct DecodeKernels {
  void (*add_norm)(const AddNormArgs& a, int64_t row);
  void (*rotate_store)(const RotateStoreArgs& a, int64_t row);
  // Indexed by DType. `scores` has room for positions[row] + 1 values, rounded up to whole lanes.
  void (*paged_attention[3])(const PagedAttentionArgs& a, int64_t row, float* scores);
  void (*silu_mul)(const SiluMulArgs& a, int64_t row);
  void (*sample)(const SampleArgs& a, int64_t row);
};

namespace baseline {
DecodeKernels decode_kernels();
}
namespace avx2 {
DecodeKernels decode_kernels();
}
namespace avx512 {
DecodeKernels decode_kernels();
}
namespace avx512bf16 {
DecodeKernels decode_kernels();
}

}  // namespace megarl
