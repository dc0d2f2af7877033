#include "../common/bind.h"

#include "api.h"

namespace megarl {

void register_loss(py::module_& m) {
  py::class_<PolicyLossSettings>(m, "PolicyLossSettings", py::module_local())
      .def(py::init<int, bool, double, double, double, int, double, int, double, double, double>(),
           py::kw_only(), py::arg("objective"), py::arg("sequence_ratio"), py::arg("clip_low"),
           py::arg("clip_high"), py::arg("dual_clip"), py::arg("kl_estimator"), py::arg("kl_coef"),
           py::arg("correction"), py::arg("correction_low"), py::arg("correction_high"),
           py::arg("entropy_coef"));
  m.attr("loss_chunk") = kLossChunk;
  m.attr("loss_sums") = static_cast<int>(kLossSums);

  m.def(
      "policy_loss",
      [](const Where& where, int64_t tokens, int64_t sequences, int dtype, const PolicyLossSettings& settings,
         uintptr_t logprob, uintptr_t old, uintptr_t advantage, uintptr_t ref, uintptr_t rollout,
         uintptr_t entropy, uintptr_t mask, uintptr_t sequence_ratio, uintptr_t cu_seqlens, uintptr_t loss,
         uintptr_t d_logprob, uintptr_t d_ratio, uintptr_t partials, uintptr_t sums) {
        const PolicyLossArgs args{tokens,
                                  sequences,
                                  dtype,
                                  settings,
                                  pointer(logprob),
                                  pointer(old),
                                  pointer(advantage),
                                  pointer(ref),
                                  pointer(rollout),
                                  pointer(entropy),
                                  pointer<uint8_t>(mask),
                                  pointer(sequence_ratio),
                                  pointer<int32_t>(cu_seqlens),
                                  pointer(loss),
                                  pointer(d_logprob),
                                  pointer(d_ratio),
                                  pointer<double>(partials),
                                  pointer<double>(sums)};
        launch(where, args, policy_loss_cpu, MEGARL_CUDA_KERNEL(policy_loss_cuda));
      },
      py::arg("where"), py::arg("tokens"), py::arg("sequences"), py::arg("dtype"), py::arg("settings"),
      py::arg("logprob"), py::arg("old"), py::arg("advantage"), py::arg("ref"), py::arg("rollout"),
      py::arg("entropy"), py::arg("mask"), py::arg("sequence_ratio"), py::arg("cu_seqlens"), py::arg("loss"),
      py::arg("d_logprob"), py::arg("d_ratio"), py::arg("partials"), py::arg("sums"));

  m.def(
      "segment_sum",
      [](const Where& where, int64_t sequences, int dtype, uintptr_t x, uintptr_t mask, uintptr_t cu_seqlens,
         uintptr_t sums) {
        const SegmentSumArgs args{sequences,
                                  dtype,
                                  pointer(x),
                                  pointer<uint8_t>(mask),
                                  pointer<int32_t>(cu_seqlens),
                                  pointer<double>(sums)};
        launch(where, args, segment_sum_cpu, MEGARL_CUDA_KERNEL(segment_sum_cuda));
      },
      py::arg("where"), py::arg("sequences"), py::arg("dtype"), py::arg("x"), py::arg("mask"),
      py::arg("cu_seqlens"), py::arg("sums"));
}

}  // namespace megarl
