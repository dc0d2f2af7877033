// The kernels without a CUDA side: generation steps, training layers and packed attention on CPU.
#include "../common/bind.h"

namespace megarl {

void register_decode(py::module_& m);
void register_layer(py::module_& m);
void register_attention(py::module_& m);

void register_cpu_only(py::module_& m) {
  register_decode(m);
  register_layer(m);
  register_attention(m);
}

}  // namespace megarl
