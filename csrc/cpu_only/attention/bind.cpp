#include "../../common/bind.h"

#include "api.h"

namespace megarl {

void register_attention(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  py::class_<PackedAttentionShape>(m, "PackedAttentionShape")
      .def(py::init([](int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim, uintptr_t cu_seqlens,
                       uintptr_t rows, uintptr_t skipped, float scale, uintptr_t query, uintptr_t key,
                       uintptr_t value) {
        return PackedAttentionShape{sequences,
                                    heads,
                                    kv_heads,
                                    dim,
                                    pointer<int32_t>(cu_seqlens),
                                    pointer<int64_t>(rows),
                                    pointer<int64_t>(skipped),
                                    scale,
                                    pointer<float>(query),
                                    pointer<float>(key),
                                    pointer<float>(value)};
      }));
  m.def(
      "packed_attention",
      [](int threads, const PackedAttentionShape& shape, uintptr_t out, uintptr_t log_sums) {
        packed_attention_cpu({shape, pointer<float>(out), pointer<float>(log_sums)}, threads);
      },
      unlocked);
  m.def(
      "packed_attention_backward",
      [](int threads, const PackedAttentionShape& shape, uintptr_t log_sums, uintptr_t grad,
         uintptr_t grad_query, uintptr_t grad_keys, uintptr_t grad_values) {
        packed_attention_backward_cpu(
            {shape, pointer<float>(log_sums), pointer<float>(grad), pointer<float>(grad_query),
             pointer<float>(grad_keys), pointer<float>(grad_values)},
            threads);
      },
      unlocked);
}

}  // namespace megarl
