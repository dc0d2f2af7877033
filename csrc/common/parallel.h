// The parallel loop of all CPU kernels. Work items never share a sum, so the number of threads cannot change
// a bit.
#pragma once

#include <cstdint>

namespace megarl {

// Calls fn(i) for i in [0, n). `cost` is the rough number of elements that one call touches; small jobs stay
// on one thread.
template <class Fn>
void parallel_for(int64_t n, int64_t cost, int threads, const Fn& fn) {
  constexpr int64_t kWorthAThread = 1 << 15;
  const int64_t useful = n * cost / kWorthAThread + 1;
  const int team = static_cast<int>(threads < useful ? threads : useful);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
  for (int64_t i = 0; i < n; ++i) fn(i);
}

}  // namespace megarl
