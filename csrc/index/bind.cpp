#include "../common/bind.h"

#include "api.h"

namespace megarl {

void register_index(py::module_& m) {
  m.def(
      "index_build",
      [](const Where& where, int64_t sequences, int64_t local, int64_t cp_rank, int64_t cp_size,
         uintptr_t tokens, uintptr_t cu_seqlens, uintptr_t loss_mask, uintptr_t labels, uintptr_t positions,
         uintptr_t segments, uintptr_t rows, uintptr_t row_count) {
        const IndexArgs args{sequences,
                             local,
                             cp_rank,
                             cp_size,
                             pointer<int64_t>(tokens),
                             pointer<int32_t>(cu_seqlens),
                             pointer<uint8_t>(loss_mask),
                             pointer<int64_t>(labels),
                             pointer<int64_t>(positions),
                             pointer<int64_t>(segments),
                             pointer<int64_t>(rows),
                             pointer<int64_t>(row_count)};
        launch(where, args, index_build_cpu, MEGARL_CUDA_KERNEL(index_build_cuda));
      },
      py::arg("where"), py::arg("sequences"), py::arg("local"), py::arg("cp_rank"), py::arg("cp_size"),
      py::arg("tokens"), py::arg("cu_seqlens"), py::arg("loss_mask"), py::arg("labels"), py::arg("positions"),
      py::arg("segments"), py::arg("rows"), py::arg("row_count"));
}

}  // namespace megarl
