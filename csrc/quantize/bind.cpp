#include "../common/bind.h"

#include "api.h"

namespace megarl {

void register_quantize(py::module_& m) {
  m.def(
      "quantize_fp8",
      [](const Where& where, uintptr_t input, int dtype, int64_t rows, int64_t columns, int64_t stride,
         int64_t block_rows, int64_t block_columns, float least, bool given, uintptr_t values,
         uintptr_t scales) {
        const QuantizeFp8Args args{pointer<void>(input),
                                   dtype,
                                   rows,
                                   columns,
                                   stride,
                                   block_rows,
                                   block_columns,
                                   least,
                                   given,
                                   pointer<uint8_t>(values),
                                   pointer<float>(scales)};
        launch(where, args, quantize_fp8_cpu, MEGARL_CUDA_KERNEL(quantize_fp8_cuda));
      },
      py::arg("where"), py::arg("input"), py::arg("dtype"), py::arg("rows"), py::arg("columns"),
      py::arg("stride"), py::arg("block_rows"), py::arg("block_columns"), py::arg("least"), py::arg("given"),
      py::arg("values"), py::arg("scales"));
  m.def(
      "quantize_int4",
      [](const Where& where, uintptr_t input, int dtype, int64_t rows, int64_t columns, int64_t stride,
         int64_t group, uintptr_t codes, uintptr_t scales) {
        const QuantizeInt4Args args{
            pointer<void>(input),     dtype, rows, columns, stride, group, pointer<uint32_t>(codes),
            pointer<uint16_t>(scales)};
        launch(where, args, quantize_int4_cpu, MEGARL_CUDA_KERNEL(quantize_int4_cuda));
      },
      py::arg("where"), py::arg("input"), py::arg("dtype"), py::arg("rows"), py::arg("columns"),
      py::arg("stride"), py::arg("group"), py::arg("codes"), py::arg("scales"));
}

}  // namespace megarl
