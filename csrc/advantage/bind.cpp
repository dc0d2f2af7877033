#include "../common/bind.h"

#include "api.h"

namespace megarl {

void register_advantage(py::module_& m) {
  m.def(
      "group_advantage",
      [](const Where& where, int64_t batch, int64_t columns, uintptr_t rewards, uintptr_t order,
         uintptr_t sorted_ids, int mode, double eps, bool normalize_columns, uintptr_t advantage) {
        const GroupAdvantageArgs args{
            batch, columns, pointer<float>(rewards), pointer<int64_t>(order),  pointer<int64_t>(sorted_ids),
            mode,  eps,     normalize_columns,       pointer<float>(advantage)};
        launch(where, args, group_advantage_cpu, MEGARL_CUDA_KERNEL(group_advantage_cuda));
      },
      py::arg("where"), py::arg("batch"), py::arg("columns"), py::arg("rewards"), py::arg("order"),
      py::arg("sorted_ids"), py::arg("mode"), py::arg("eps"), py::arg("normalize_columns"),
      py::arg("advantage"));

  m.attr("moment_chunk") = kMomentChunk;
  m.def(
      "moments",
      [](const Where& where, int64_t tokens, uintptr_t x, uintptr_t mask, uintptr_t partials,
         uintptr_t moments) {
        const MomentsArgs args{tokens, pointer<float>(x), pointer<uint8_t>(mask), pointer<double>(partials),
                               pointer<double>(moments)};
        launch(where, args, moments_cpu, MEGARL_CUDA_KERNEL(moments_cuda));
      },
      py::arg("where"), py::arg("tokens"), py::arg("x"), py::arg("mask"), py::arg("partials"),
      py::arg("moments"));

  m.def(
      "merge_moments",
      [](const Where& where, int64_t count, uintptr_t parts, uintptr_t moments) {
        const MergeMomentsArgs args{count, pointer<double>(parts), pointer<double>(moments)};
        launch(where, args, merge_moments_cpu, MEGARL_CUDA_KERNEL(merge_moments_cuda));
      },
      py::arg("where"), py::arg("count"), py::arg("parts"), py::arg("moments"));

  m.def(
      "whiten",
      [](const Where& where, int64_t tokens, uintptr_t x, uintptr_t mask, uintptr_t moments, double eps,
         bool keep_mean, double clip, uintptr_t out) {
        const WhitenArgs args{
            tokens, pointer<float>(x),  pointer<uint8_t>(mask), pointer<double>(moments), eps, keep_mean,
            clip,   pointer<float>(out)};
        launch(where, args, whiten_cpu, MEGARL_CUDA_KERNEL(whiten_cuda));
      },
      py::arg("where"), py::arg("tokens"), py::arg("x"), py::arg("mask"), py::arg("moments"), py::arg("eps"),
      py::arg("keep_mean"), py::arg("clip"), py::arg("out"));

  m.def(
      "gae",
      [](const Where& where, int64_t sequences, uintptr_t rewards, uintptr_t values, uintptr_t mask,
         uintptr_t cu_seqlens, uintptr_t bootstrap, double gamma, uintptr_t lambda, int64_t lambda_stride,
         uintptr_t advantages, uintptr_t returns) {
        const GaeArgs args{sequences,
                           pointer<float>(rewards),
                           pointer<float>(values),
                           pointer<uint8_t>(mask),
                           pointer<int32_t>(cu_seqlens),
                           pointer<float>(bootstrap),
                           gamma,
                           pointer<float>(lambda),
                           lambda_stride,
                           pointer<float>(advantages),
                           pointer<float>(returns)};
        launch(where, args, gae_cpu, MEGARL_CUDA_KERNEL(gae_cuda));
      },
      py::arg("where"), py::arg("sequences"), py::arg("rewards"), py::arg("values"), py::arg("mask"),
      py::arg("cu_seqlens"), py::arg("bootstrap"), py::arg("gamma"), py::arg("lam"), py::arg("lambda_stride"),
      py::arg("advantages"), py::arg("returns"));
}

}  // namespace megarl
