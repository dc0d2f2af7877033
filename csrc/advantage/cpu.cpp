#include "../common/parallel.h"
#include "group.h"

namespace megarl {
namespace {

Moments chunk_moments(const MomentsArgs& a, int64_t begin, int64_t end) {
  Moments m{0, 0, 0};
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (!a.mask[i]) continue;
    m.n += 1;
    sum += a.x[i];
  }
  if (m.n == 0) return m;
  m.mean = sum / m.n;
  for (int64_t i = begin; i < end; ++i) {
    const double centred = a.mask[i] ? a.x[i] - m.mean : 0;
    m.m2 += centred * centred;
  }
  return m;
}

// Iterates over a sequence from the last token to the first. Each step depends on the one before, so two
// sequences are processed in one loop to hide the latency.
struct GaeCursor {
  GaeCursor(const GaeArgs& a, int64_t b)
      : t(a.cu_seqlens[b + 1]),
        begin(a.cu_seqlens[b]),
        lambda(a.lambda[b * a.lambda_stride]),
        state{0, a.bootstrap ? a.bootstrap[b] : 0.0} {}

  MEGARL_HD bool left() const { return t > begin; }

  MEGARL_HD void step(const GaeArgs& a) {
    --t;
    float advantage = 0, target = 0;
    if (a.mask[t]) {
      state = apply(gae_token(a.rewards[t], a.values[t], a.gamma, lambda), state);
      advantage = static_cast<float>(state.advantage);
      target = static_cast<float>(state.advantage + a.values[t]);
    }
    a.advantages[t] = advantage;
    a.returns[t] = target;
  }

  int64_t t, begin;
  double lambda;
  GaeState state;
};

// Fused multiply-add halves the latency of a step. The copy that uses it runs if the processor has it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
__attribute__((target_clones("arch=x86-64-v3", "default")))
#endif
void gae_pair(const GaeArgs& args, int64_t first) {
  GaeCursor a(args, first);
  if (first + 1 < args.sequences) {
    GaeCursor b(args, first + 1);
    while (a.left() && b.left()) {
      a.step(args);
      b.step(args);
    }
    while (b.left()) b.step(args);
  }
  while (a.left()) a.step(args);
}

}  // namespace

void group_advantage_cpu(const GroupAdvantageArgs& args, int threads) {
  parallel_for(args.batch, 16 * args.columns, threads, [&](int64_t i) { group_at(args, i); });
}

void moments_cpu(const MomentsArgs& args, int threads) {
  const int64_t chunks = (args.tokens + kMomentChunk - 1) / kMomentChunk;
  Moments* partials = reinterpret_cast<Moments*>(args.partials);
  parallel_for(chunks, kMomentChunk, threads, [&](int64_t c) {
    const int64_t begin = c * kMomentChunk, end = begin + kMomentChunk;
    partials[c] = chunk_moments(args, begin, end < args.tokens ? end : args.tokens);
  });
  merge_moments_cpu({chunks, args.partials, args.moments}, threads);
}

void merge_moments_cpu(const MergeMomentsArgs& args, int) {
  Moments all{0, 0, 0};
  for (int64_t i = 0; i < args.count; ++i) all = merge(all, reinterpret_cast<const Moments*>(args.parts)[i]);
  *reinterpret_cast<Moments*>(args.moments) = all;
}

void whiten_cpu(const WhitenArgs& args, int threads) {
  const Moments m = *reinterpret_cast<const Moments*>(args.moments);
  parallel_for(args.tokens, 4, threads, [&](int64_t i) {
    args.out[i] =
        args.mask[i] ? static_cast<float>(whiten(args.x[i], m, args.eps, args.keep_mean, args.clip)) : 0.0f;
  });
}

void gae_cpu(const GaeArgs& args, int threads) {
  if (args.sequences == 0) return;
  const int64_t mean_length = args.cu_seqlens[args.sequences] / args.sequences;
  // A token takes about a nanosecond. Below about 10^5 tokens, starting a second thread costs more than it
  // saves.
  parallel_for((args.sequences + 1) / 2, mean_length / 2, threads,
               [&](int64_t pair) { gae_pair(args, 2 * pair); });
}

}  // namespace megarl
