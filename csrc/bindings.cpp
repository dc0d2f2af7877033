#include "common/bind.h"

namespace megarl {

void register_logprob(py::module_& m);
void register_advantage(py::module_& m);
void register_loss(py::module_& m);
void register_decode(py::module_& m);
void register_layer(py::module_& m);
void register_attention(py::module_& m);

PYBIND11_MODULE(_C, m) {
  m.doc() = "megarl's kernels. Arguments are raw addresses: call them through megarl.ops, which checks them.";
#ifdef MEGARL_WITH_CUDA
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
  py::class_<Where>(m, "Where")
      .def(py::init<bool, uintptr_t, int>(), py::arg("cuda"), py::arg("stream"), py::arg("threads"));
  register_logprob(m);
  register_advantage(m);
  register_loss(m);
  register_decode(m);
  register_layer(m);
  register_attention(m);
}

}  // namespace megarl
