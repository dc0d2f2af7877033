#include "../common/bind.h"

#include "api.h"

namespace megarl {

void register_digest(py::module_& m) {
  m.attr("leaf_bytes") = kLeafBytes;
  m.def(
      "leaf_digests",
      [](const Where& where, uintptr_t bytes, int64_t size, uintptr_t begins, uintptr_t ends, int64_t count,
         uintptr_t leaves) {
        const LeafDigestsArgs args{pointer<uint8_t>(bytes), size,  pointer<int64_t>(begins),
                                   pointer<int64_t>(ends),  count, pointer<uint8_t>(leaves)};
        launch(where, args, nullptr, MEGARL_CUDA_KERNEL(leaf_digests_cuda));
      },
      py::arg("where"), py::arg("bytes"), py::arg("size"), py::arg("begins"), py::arg("ends"),
      py::arg("count"), py::arg("leaves"));
}

}  // namespace megarl
