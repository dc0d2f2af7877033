#include "../../common/isa.h"
#include "../../common/parallel.h"
#include "rows.h"

namespace megarl {
namespace {

// Called before a parallel loop: an exception inside one would end the process.
const LayerKernels& kernels() {
  static const LayerKernels best_copy = MEGARL_BEST_COPY(layer_kernels)();
  return best_copy;
}

}  // namespace

void rms_norm_backward_cpu(const RmsNormBackwardArgs& a, int threads) {
  const int64_t blocks = (a.rows + kRowsPerBlock - 1) / kRowsPerBlock;
  const auto rms_norm_backward = kernels().rms_norm_backward;
  parallel_for(blocks, 2 * kRowsPerBlock * a.width, threads,
               [&](int64_t block) { rms_norm_backward(a, block); });
}

void silu_mul_backward_cpu(const SiluMulBackwardArgs& a, int threads) {
  const auto silu_mul_backward = kernels().silu_mul_backward;
  parallel_for(a.rows, 8 * a.width, threads, [&](int64_t row) { silu_mul_backward(a, row); });
}

void rotate_cpu(const RotateArgs& a, int threads) {
  const auto rotate = kernels().rotate;
  parallel_for(a.rows, a.heads * a.dim, threads, [&](int64_t row) { rotate(a, row); });
}

}  // namespace megarl
