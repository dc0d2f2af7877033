#include "../common/parallel.h"
#include "token.h"

namespace megarl {
namespace {

template <class T>
void policy_loss_chunks(const PolicyLossArgs& a, int threads) {
  const int64_t chunks = (a.tokens + kLossChunk - 1) / kLossChunk;
  parallel_for(chunks, 16 * kLossChunk, threads, [&](int64_t c) {
    double sums[kLossSums] = {};
    const int64_t end = (c + 1) * kLossChunk < a.tokens ? (c + 1) * kLossChunk : a.tokens;
    for (int64_t t = c * kLossChunk; t < end; ++t) policy_loss_token<T>(a, t, sums);
    for (int k = 0; k < kLossSums; ++k) a.partials[c * kLossSums + k] = sums[k];
  });
  for (int k = 0; k < kLossSums; ++k) a.sums[k] = 0;
  for (int64_t c = 0; c < chunks; ++c) add_sums(a.sums, a.partials + c * kLossSums);
}

template <class T>
void segment_sums(const SegmentSumArgs& a, int threads) {
  parallel_for(a.sequences, 1024, threads, [&](int64_t b) {
    double sum = 0, count = 0;
    for (int64_t t = a.cu_seqlens[b]; t < a.cu_seqlens[b + 1]; ++t) {
      if (!a.mask[t]) continue;
      sum += static_cast<const T*>(a.x)[t];
      count += 1;
    }
    a.sums[2 * b] = sum;
    a.sums[2 * b + 1] = count;
  });
}

}  // namespace

void policy_loss_cpu(const PolicyLossArgs& args, int threads) {
  if (args.dtype == static_cast<int>(DType::kFloat64)) return policy_loss_chunks<double>(args, threads);
  policy_loss_chunks<float>(args, threads);
}

void segment_sum_cpu(const SegmentSumArgs& args, int threads) {
  if (args.dtype == static_cast<int>(DType::kFloat64)) return segment_sums<double>(args, threads);
  segment_sums<float>(args, threads);
}

}  // namespace megarl
