#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../common/isa.h"
#include "../../common/parallel.h"
#include "rows.h"

namespace megarl {
namespace {

// Called before a parallel loop: an exception inside one would end the process.
const DecodeKernels& kernels() {
  static const DecodeKernels best_copy = MEGARL_BEST_COPY(decode_kernels)();
  return best_copy;
}

// Refuses an index that does not lie in [0, size): memory of others would be read or written.
void check_index(const char* what, int64_t row, int64_t index, int64_t size) {
  if (index >= 0 && index < size) return;
  throw std::out_of_range("row " + std::to_string(row) + " has " + what + " " + std::to_string(index) +
                          ", which is not in [0, " + std::to_string(size) + ")");
}

}  // namespace

void add_norm_cpu(const AddNormArgs& a, int threads) {
  const auto add_norm = kernels().add_norm;
  parallel_for(a.rows, a.width, threads, [&](int64_t row) { add_norm(a, row); });
}

void rotate_store_cpu(const RotateStoreArgs& a, int threads) {
  for (int64_t row = 0; row < a.rows; ++row) {
    check_index("position", row, a.positions[row], a.num_positions);
    check_index("slot", row, a.slots[row], a.num_slots);
  }
  const int64_t width = (a.heads + 2 * a.kv_heads) * a.dim;
  const auto rotate_store = kernels().rotate_store;
  parallel_for(a.rows, width, threads, [&](int64_t row) { rotate_store(a, row); });
}

void paged_attention_cpu(const PagedAttentionArgs& a, int threads) {
  if (a.dtype < 0 || a.dtype > 2) throw std::invalid_argument("paged_attention: float64 has no kernel");
  const auto attend = kernels().paged_attention[a.dtype];
  int64_t tokens = 0;
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t last = a.positions[row], request = a.requests[row];
    check_index("position", row, last, a.table_width);
    check_index("request", row, request, a.num_requests);
    const int64_t first = a.window ? std::max<int64_t>(last + 1 - a.window, 0) : 0;
    const int32_t* slots = a.table + request * a.table_width;
    for (int64_t token = first; token <= last; ++token) check_index("slot", row, slots[token], a.num_slots);
    tokens += last + 1;
  }
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
  const auto silu_mul = kernels().silu_mul;
  parallel_for(a.rows, 4 * a.width, threads, [&](int64_t row) { silu_mul(a, row); });
}

void sample_cpu(const SampleArgs& a, int threads) {
  const auto sample = kernels().sample;
  parallel_for(a.rows, 4 * a.vocab, threads, [&](int64_t row) { sample(a, row); });
}

}  // namespace megarl
