#include "../common/bind.h"

#include "api.h"

namespace megarl {

void register_logprob(py::module_& m) {
  py::class_<LogitRows>(m, "LogitRows", py::module_local())
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, int>(), py::arg("rows"), py::arg("columns"),
           py::arg("valid"), py::arg("row_stride"), py::arg("vocab_start"), py::arg("dtype"));

  m.def(
      "logprob_stats",
      [](const Where& where, const LogitRows& shape, uintptr_t logits, uintptr_t labels, uintptr_t inv_temp,
         int64_t temp_stride, bool with_entropy, uintptr_t stats) {
        const StatsArgs args{
            shape,        pointer(logits), pointer<int64_t>(labels), pointer<double>(inv_temp), temp_stride,
            with_entropy, pointer(stats)};
        launch(where, args, logprob_stats_cpu, MEGARL_CUDA_KERNEL(logprob_stats_cuda));
      },
      py::arg("where"), py::arg("shape"), py::arg("logits"), py::arg("labels"), py::arg("inv_temp"),
      py::arg("temp_stride"), py::arg("with_entropy"), py::arg("stats"));

  m.def(
      "logprob_rows",
      [](const Where& where, const LogitRows& shape, uintptr_t logits, uintptr_t labels, uintptr_t inv_temp,
         int64_t temp_stride, bool with_entropy, uintptr_t stats, uintptr_t logprob, uintptr_t entropy,
         uintptr_t context) {
        const RowsArgs args{{shape, pointer(logits), pointer<int64_t>(labels), pointer<double>(inv_temp),
                             temp_stride, with_entropy, pointer(stats)},
                            pointer(logprob),
                            pointer(entropy),
                            pointer(context)};
        launch(where, args, logprob_rows_cpu, MEGARL_CUDA_KERNEL(logprob_rows_cuda));
      },
      py::arg("where"), py::arg("shape"), py::arg("logits"), py::arg("labels"), py::arg("inv_temp"),
      py::arg("temp_stride"), py::arg("with_entropy"), py::arg("stats"), py::arg("logprob"),
      py::arg("entropy"), py::arg("context"));

  m.def(
      "logprob_merge",
      [](const Where& where, int64_t ranks, int64_t rows, int dtype, uintptr_t stats, uintptr_t labels,
         uintptr_t inv_temp, int64_t temp_stride, uintptr_t logprob, uintptr_t entropy, uintptr_t context) {
        const MergeArgs args{ranks,
                             rows,
                             dtype,
                             pointer(stats),
                             pointer<int64_t>(labels),
                             pointer<double>(inv_temp),
                             temp_stride,
                             pointer(logprob),
                             pointer(entropy),
                             pointer(context)};
        launch(where, args, logprob_merge_cpu, MEGARL_CUDA_KERNEL(logprob_merge_cuda));
      },
      py::arg("where"), py::arg("ranks"), py::arg("rows"), py::arg("dtype"), py::arg("stats"),
      py::arg("labels"), py::arg("inv_temp"), py::arg("temp_stride"), py::arg("logprob"), py::arg("entropy"),
      py::arg("context"));

  m.def(
      "logprob_backward",
      [](const Where& where, const LogitRows& shape, uintptr_t logits, uintptr_t grad, int64_t grad_stride,
         uintptr_t labels, uintptr_t inv_temp, int64_t temp_stride, uintptr_t context, uintptr_t grad_logprob,
         uintptr_t grad_entropy) {
        const BackwardArgs args{shape,
                                pointer(logits),
                                pointer(grad),
                                grad_stride,
                                pointer<int64_t>(labels),
                                pointer<double>(inv_temp),
                                temp_stride,
                                pointer(context),
                                pointer(grad_logprob),
                                pointer(grad_entropy)};
        launch(where, args, logprob_backward_cpu, MEGARL_CUDA_KERNEL(logprob_backward_cuda));
      },
      py::arg("where"), py::arg("shape"), py::arg("logits"), py::arg("grad"), py::arg("grad_stride"),
      py::arg("labels"), py::arg("inv_temp"), py::arg("temp_stride"), py::arg("context"),
      py::arg("grad_logprob"), py::arg("grad_entropy"));
}

}  // namespace megarl
