#include <cstring>

#include "../common/isa.h"
#include "../common/parallel.h"
#include "api.h"
#include "rows.h"

namespace megarl {
namespace {

const AllRowKernels& machine_kernels() {
  static const AllRowKernels kernels = MEGARL_BEST_COPY(row_kernels)();
  return kernels;
}

const RowKernels<float>& kernels_for(const float*) {
  return machine_kernels().float32;
}
const RowKernels<BFloat16>& kernels_for(const BFloat16*) {
  return machine_kernels().bfloat16;
}
const RowKernels<Float16>& kernels_for(const Float16*) {
  return machine_kernels().float16;
}
const RowKernels<double>& kernels_for(const double*) {
  return machine_kernels().float64;
}

template <class T>
void stats_rows(const StatsArgs& a, int threads) {
  using A = accumulator_t<T>;
  const LogitRows& shape = a.shape;
  const RowKernels<T>& kernels = kernels_for(static_cast<const T*>(nullptr));
  parallel_for(shape.rows, shape.valid, threads, [&](int64_t row) {
    A* out = static_cast<A*>(a.stats) + 4 * row;
    const int64_t label = a.labels[row];
    if (label == -1) {
      out[0] = out[1] = out[2] = out[3] = 0;
      return;
    }
    const T* x = static_cast<const T*>(a.logits) + row * shape.row_stride;
    const A inv_temp = static_cast<A>(a.inv_temp[row * a.temp_stride]);
    kernels.stats(x, shape.valid, label - shape.vocab_start, inv_temp, a.with_entropy, out);
  });
}

template <class A>
void merge_rows(const MergeArgs& a, int threads) {
  parallel_for(a.rows, 64 * a.ranks, threads, [&](int64_t row) {
    A* logprob = static_cast<A*>(a.logprob) + row;
    A* entropy = static_cast<A*>(a.entropy) + row;
    A* context = static_cast<A*>(a.context) + 3 * row;
    if (a.labels[row] == -1) {
      *logprob = *entropy = context[0] = context[1] = context[2] = 0;
      return;
    }
    const A inv_temp = static_cast<A>(a.inv_temp[row * a.temp_stride]);
    RowStats<A> all = empty_stats<A>();
    A label_logit = NAN;
    for (int64_t rank = 0; rank < a.ranks; ++rank) {
      const A* s = static_cast<const A*>(a.stats) + 4 * (rank * a.rows + row);
      all = merge(all, RowStats<A>{s[0], s[1], s[2]}, inv_temp);
      if (s[3] == s[3]) label_logit = s[3];
    }
    const RowResult<A> r = finish_row(all, label_logit, a.inv_temp[row * a.temp_stride]);
    *logprob = r.logprob;
    *entropy = r.entropy;
    context[0] = all.max;
    context[1] = r.log_sum;
    context[2] = r.entropy;
  });
}

template <class T>
void backward_rows(const BackwardArgs& a, int threads) {
  using A = accumulator_t<T>;
  const LogitRows& shape = a.shape;
  const RowKernels<T>& kernels = kernels_for(static_cast<const T*>(nullptr));
  parallel_for(shape.rows, 2 * shape.columns, threads, [&](int64_t row) {
    T* grad = static_cast<T*>(a.grad) + row * a.grad_stride;
    const int64_t label = a.labels[row];
    const A g = static_cast<const A*>(a.grad_logprob)[row];
    const A h = a.grad_entropy ? static_cast<const A*>(a.grad_entropy)[row] : A(0);
    if (label == -1 || (g == 0 && h == 0)) {
      std::memset(static_cast<void*>(grad), 0, shape.columns * sizeof(T));
      return;
    }
    const T* x = static_cast<const T*>(a.logits) + row * shape.row_stride;
    const A* context = static_cast<const A*>(a.context) + 3 * row;
    const A inv_temp = static_cast<A>(a.inv_temp[row * a.temp_stride]);
    const RowGradient<A> k = row_gradient(context[0], context[1], context[2], g, h, inv_temp);
    kernels.backward(x, grad, shape.valid, shape.columns, label - shape.vocab_start, k);
  });
}

}  // namespace

void logprob_stats_cpu(const StatsArgs& args, int threads) {
  dispatch_dtype(args.shape.dtype, "logprob_stats",
                 [&](auto* type) { stats_rows<std::remove_pointer_t<decltype(type)>>(args, threads); });
}

void logprob_merge_cpu(const MergeArgs& args, int threads) {
  if (args.dtype == static_cast<int>(DType::kFloat64)) return merge_rows<double>(args, threads);
  merge_rows<float>(args, threads);
}

void logprob_rows_cpu(const RowsArgs& args, int threads) {
  const StatsArgs& s = args.stats;
  const DType wide = s.shape.dtype == static_cast<int>(DType::kFloat64) ? DType::kFloat64 : DType::kFloat32;
  logprob_stats_cpu(s, threads);
  logprob_merge_cpu({1, s.shape.rows, static_cast<int>(wide), s.stats, s.labels, s.inv_temp, s.temp_stride,
                     args.logprob, args.entropy, args.context},
                    threads);
}

void logprob_backward_cpu(const BackwardArgs& args, int threads) {
  if (args.shape.columns == 0) return;  // an empty shard may have no memory at all
  dispatch_dtype(args.shape.dtype, "logprob_backward",
                 [&](auto* type) { backward_rows<std::remove_pointer_t<decltype(type)>>(args, threads); });
}

}  // namespace megarl
