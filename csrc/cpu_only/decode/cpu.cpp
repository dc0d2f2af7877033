#include <stdexcept>
#include <vector>

#include "../../common/isa.h"
#include "../../common/parallel.h"
#include "rows.h"

namespace megarl {
namespace {

const DecodeKernels& kernels() {
  static const DecodeKernels best_copy = MEGARL_BEST_COPY(decode_kernels)();
  return best_copy;
}

}  // namespace

void add_norm_cpu(const AddNormArgs& a, int threads) {
  parallel_for(a.rows, a.width, threads, [&](int64_t row) { kernels().add_norm(a, row); });
}

void rotate_store_cpu(const RotateStoreArgs& a, int threads) {
  const int64_t width = (a.heads + 2 * a.kv_heads) * a.dim;
  parallel_for(a.rows, width, threads, [&](int64_t row) { kernels().rotate_store(a, row); });
}

void paged_attention_cpu(const PagedAttentionArgs& a, int threads) {
  if (a.dtype < 0 || a.dtype > 2) throw std::invalid_argument("paged_attention: float64 has no kernel");
  const auto attend = kernels().paged_attention[a.dtype];
  int64_t tokens = 0;
  for (int64_t row = 0; row < a.rows; ++row) tokens += a.positions[row] + 1;
  const int64_t cost = a.rows ? tokens / a.rows * a.heads * a.dim : 0;
  parallel_for(a.rows, cost, threads, [&](int64_t row) {
    thread_local std::vector<float> scores;
    constexpr int64_t kPadding = 16;  // scores are padded to whole groups of lanes
    const size_t needed = static_cast<size_t>(a.positions[row] + 1 + kPadding);
    if (scores.size() < needed) scores.resize(needed);
    attend(a, row, scores.data());
  });
}

void silu_mul_cpu(const SiluMulArgs& a, int threads) {
  parallel_for(a.rows, 4 * a.width, threads, [&](int64_t row) { kernels().silu_mul(a, row); });
}

void sample_cpu(const SampleArgs& a, int threads) {
  parallel_for(a.rows, 4 * a.vocab, threads, [&](int64_t row) { kernels().sample(a, row); });
}

}  // namespace megarl
