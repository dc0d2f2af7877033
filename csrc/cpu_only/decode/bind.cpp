#include "../../common/bind.h"

#include "api.h"

namespace megarl {

void register_decode(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  m.def(
      "add_norm",
      [](int threads, int64_t rows, int64_t width, uintptr_t update, uintptr_t weight, float eps,
         uintptr_t residual, uintptr_t out) {
        add_norm_cpu({rows, width, pointer<float>(update), pointer<float>(weight), eps,
                      pointer<float>(residual), pointer<float>(out)},
                     threads);
      },
      unlocked);
  m.def(
      "rotate_store",
      [](int threads, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, uintptr_t qkv,
         uintptr_t q_norm, uintptr_t k_norm, float eps, uintptr_t cos_sin, uintptr_t positions,
         uintptr_t slots, int64_t num_positions, int64_t num_slots, uintptr_t keys, uintptr_t values) {
        rotate_store_cpu(
            {rows, heads, kv_heads, dim, pointer<float>(qkv), pointer<float>(q_norm), pointer<float>(k_norm),
             eps, pointer<float>(cos_sin), pointer<int64_t>(positions), pointer<int64_t>(slots),
             num_positions, num_slots, pointer<float>(keys), pointer<float>(values)},
            threads);
      },
      unlocked);
  m.def(
      "paged_attention",
      [](int threads, int dtype, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
         uintptr_t queries, int64_t query_stride, uintptr_t keys, uintptr_t values, uintptr_t table,
         int64_t num_requests, int64_t table_width, int64_t num_slots, uintptr_t requests,
         uintptr_t positions, int64_t window, float scale, uintptr_t out) {
        paged_attention_cpu(
            {dtype, rows, heads, kv_heads, dim, pointer(queries), query_stride, pointer(keys),
             pointer(values), pointer<int32_t>(table), num_requests, table_width, num_slots,
             pointer<int64_t>(requests), pointer<int64_t>(positions), window, scale, pointer(out)},
            threads);
      },
      unlocked);
  m.def(
      "silu_mul",
      [](int threads, int64_t rows, int64_t width, uintptr_t gate_up, uintptr_t out) {
        silu_mul_cpu({rows, width, pointer<float>(gate_up), pointer<float>(out)}, threads);
      },
      unlocked);
  m.def(
      "sample",
      [](int threads, int64_t rows, int64_t vocab, uintptr_t logits, uintptr_t temperature, uintptr_t uniform,
         uintptr_t tokens, uintptr_t logprobs) {
        sample_cpu({rows, vocab, pointer<float>(logits), pointer<float>(temperature),
                    pointer<double>(uniform), pointer<int32_t>(tokens), pointer<float>(logprobs)},
                   threads);
      },
      unlocked);
}

}  // namespace megarl
