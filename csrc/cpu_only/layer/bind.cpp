#include "../../common/bind.h"

#include "api.h"

namespace megarl {

void register_layer(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  m.attr("rows_per_block") = kRowsPerBlock;
  m.def(
      "rms_norm_backward",
      [](int threads, int64_t rows, int64_t width, uintptr_t x, uintptr_t weight, float eps, uintptr_t grad,
         uintptr_t grad_x, uintptr_t grad_weights) {
        rms_norm_backward_cpu({rows, width, pointer<float>(x), pointer<float>(weight), eps,
                               pointer<float>(grad), pointer<float>(grad_x), pointer<float>(grad_weights)},
                              threads);
      },
      unlocked);
  m.def(
      "silu_mul_backward",
      [](int threads, int64_t rows, int64_t width, uintptr_t gate_up, uintptr_t grad,
         uintptr_t grad_gate_up) {
        silu_mul_backward_cpu(
            {rows, width, pointer<float>(gate_up), pointer<float>(grad), pointer<float>(grad_gate_up)},
            threads);
      },
      unlocked);
  m.def(
      "rotate",
      [](int threads, int64_t rows, int64_t heads, int64_t dim, uintptr_t x, uintptr_t cos_sin, bool back,
         uintptr_t out) {
        rotate_cpu({rows, heads, dim, pointer<float>(x), pointer<float>(cos_sin), back, pointer<float>(out)},
                   threads);
      },
      unlocked);
}

}  // namespace megarl
