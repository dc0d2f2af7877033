// The Python module of the emulated kernels: the bindings of csrc/, and the settings of the emulator.
#include <pybind11/stl.h>

#include "common/bind.h"
#include "simt.h"

#define DECLARE(operation) void register_##operation(py::module_& m);
#define REGISTER(operation) register_##operation(m);

namespace megarl {

SIMT_OPERATIONS(DECLARE)

PYBIND11_MODULE(_C, m) {
  m.attr("has_cuda") = true;
  register_where(m);
  SIMT_OPERATIONS(REGISTER)
  m.def("simt_configure", [](int order, unsigned seed, int poison) {
    simt::machine.order = static_cast<simt::Order>(order);
    simt::machine.random.seed(seed);
    simt::machine.poison = poison;
  });
  m.def("simt_stream",
        [](int device) { return reinterpret_cast<uintptr_t>(&simt::machine.streams[device]); });
  m.def("simt_current_device", [] { return simt::machine.device; });
  m.def("simt_take_launches", [] {
    std::vector<std::pair<std::string, int>> launches;
    for (const auto& launch : std::exchange(simt::machine.launches, {}))
      launches.emplace_back(launch.kernel, launch.device);
    return launches;
  });
}

}  // namespace megarl
