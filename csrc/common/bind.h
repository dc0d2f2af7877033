// Helpers of the bindings. Addresses are passed as integers, and one bound function serves CPU and CUDA.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#ifdef MEGARL_WITH_CUDA
#include "device.h"

#define MEGARL_CUDA_KERNEL(fn) fn
#else
#define MEGARL_CUDA_KERNEL(fn) nullptr
#endif

namespace megarl {

namespace py = pybind11;

// Place where a kernel runs: a stream of a CUDA device, or a number of CPU threads.
struct Where {
  bool cuda;
  uintptr_t stream;
  int threads;
  int device;
};

// Classes are local to their module: tests load other builds of the kernels beside this one.
inline void register_where(py::module_& m) {
  py::class_<Where>(m, "Where", py::module_local())
      .def(py::init<bool, uintptr_t, int, int>(), py::arg("cuda"), py::arg("stream"), py::arg("threads"),
           py::arg("device") = 0);
}

template <class T = void>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Runs the CPU or the CUDA side of a kernel, with Python's global interpreter lock released. A null side is
// missing.
template <class Args>
void launch(const Where& where, const Args& args, void (*cpu)(const std::common_type_t<Args>&, int),
            void (*cuda)(const std::common_type_t<Args>&, void*)) {
  py::gil_scoped_release release;
  if (!where.cuda) {
    if (!cpu)
      throw std::invalid_argument("this kernel runs on CUDA devices only; its tensors are on the CPU");
    return cpu(args, where.threads);
  }
  if (!cuda)
    throw std::runtime_error("this build of megarl has no CUDA kernels; build it with MEGARL_CUDA=1");
#ifdef MEGARL_WITH_CUDA
  const DeviceGuard guard(where.device);
#endif
  cuda(args, pointer(where.stream));
}

}  // namespace megarl
