// CPU work on one row, compiled for several instruction sets.
#pragma once

#include "../common/row_math.h"

namespace megarl {

template <class T>
struct RowKernels {
  using A = accumulator_t<T>;
  // out[4] = (max, sum, dot, label logit) of n logits. The label logit is NaN if `label` is not a column. dot
  // is 0 unless `with_dot`.
  void (*stats)(const T* x, int64_t n, int64_t label, A inv_temp, bool with_dot, A* out);
  // grad[columns]: the gradient of the first `valid` columns, then zeros. `grad` may alias `x`.
  void (*backward)(const T* x, T* grad, int64_t valid, int64_t columns, int64_t label,
                   const RowGradient<A>& k);
};

struct AllRowKernels {
  RowKernels<float> float32;
  RowKernels<BFloat16> bfloat16;
  RowKernels<Float16> float16;
  RowKernels<double> float64;
};

namespace baseline {
AllRowKernels row_kernels();
}
namespace avx2 {
AllRowKernels row_kernels();
}
namespace avx512 {
AllRowKernels row_kernels();
}
namespace avx512bf16 {
AllRowKernels row_kernels();
}

}  // namespace megarl
