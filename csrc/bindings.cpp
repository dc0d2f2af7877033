#include "common/bind.h"

namespace megarl {

void register_logprob(py::module_& m);
void register_advantage(py::module_& m);
void register_loss(py::module_& m);
void register_digest(py::module_& m);
void register_quantize(py::module_& m);
void register_cpu_only(py::module_& m);

PYBIND11_MODULE(_C, m) {
  m.doc() = "megarl's kernels. They take unchecked addresses: call them through megarl.ops and megarl.cpu.";
#ifdef MEGARL_WITH_CUDA
  m.attr("has_cuda") = true;
  m.attr("cuda_architectures") = MEGARL_CUDA_ARCHITECTURES;  // CMake's names, such as "80-real,100-virtual"
#else
  m.attr("has_cuda") = false;
  m.attr("cuda_architectures") = "";
#endif
  register_where(m);
  register_logprob(m);
  register_advantage(m);
  register_loss(m);
  register_digest(m);
  register_quantize(m);
  register_cpu_only(m);
}

}  // namespace megarl
