// Attention of one sequence and one head of keys and values, compiled for several instruction sets.
#pragma once

#include "api.h"

namespace megarl {

struct AttentionKernels {
  // forward_floats and backward_floats return the number of floats that `scratch` needs.
  void (*forward)(const PackedAttentionArgs& a, int64_t sequence, int64_t kv_head, float* scratch);
  int64_t (*forward_floats)(int64_t length, int64_t dim);
  void (*backward)(const PackedAttentionBackwardArgs& a, int64_t sequence, int64_t kv_head, float* scratch);
  int64_t (*backward_floats)(int64_t length, int64_t dim);
};

namespace baseline {
AttentionKernels attention_kernels();
}
namespace avx2 {
AttentionKernels attention_kernels();
}
namespace avx512 {
AttentionKernels attention_kernels();
}
namespace avx512bf16 {
AttentionKernels attention_kernels();
}

}  // namespace megarl
