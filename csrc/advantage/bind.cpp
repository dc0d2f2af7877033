#include "../common/bind.h"
#include "api.h"

namespace megarl {

void register_advantage(py::module_& m) {
  m.def(
      "group_advantage",
      [](const Where& where, int64_t batch, int64_t columns, uintptr_t rewards, uintptr_t order,
         uintptr_t sorted_ids, int mode, double eps, bool normalize_columns, uintptr_t advantage) {
        const GroupAdvantageArgs args{batch,
                                      columns,
                                      pointer<float>(rewards),
                                      pointer<int64_t>(order),
                                      pointer<int64_t>(sorted_ids),
                                      mode,
                                      eps,
                                      normalize_columns,
                                      pointer<float>(advantage)};
        launch(where, args, group_advantage_cpu, MEGARL_CUDA_KERNEL(group_advantage_cuda));
      },
      py::arg("where"), py::arg("batch"), py::arg("columns"), py::arg("rewards"), py::arg("order"),
      py::arg("sorted_ids"), py::arg("mode"), py::arg("eps"), py::arg("normalize_columns"), py::arg("advantage"));
}

}  // namespace megarl
