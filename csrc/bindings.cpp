#include "common/bind.h"

namespace megarl {

void register_logprob(py::module_& m);
void register_advantage(py::module_& m);
void register_loss(py::module_& m);
void register_cpu_only(py::module_& m);

PYBIND11_MODULE(_C, m) {
  m.doc() = "megarl's kernels. They take unchecked addresses: call them through megarl.ops and megarl.cpu.";
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
  register_cpu_only(m);
}

}  // namespace megarl
