// Choice of the copy of the row kernels: the best instruction set of this machine, or the one named by
// MEGARL_CPU_ISA, with which tests reach the other copies.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace megarl {

enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

inline Isa machine_isa() {
  const char* named = std::getenv("MEGARL_CPU_ISA");
  const std::string wanted = named ? named : "";
#ifdef MEGARL_X86_LEVELS
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = v4 && __builtin_cpu_supports("avx512bf16");
  if (bf16 && (wanted.empty() || wanted == "avx512bf16")) return Isa::kAvx512Bf16;
  if (v4 && (wanted.empty() || wanted == "avx512")) return Isa::kAvx512;
  if (v3 && (wanted.empty() || wanted == "avx2")) return Isa::kAvx2;
#endif
  if (wanted.empty() || wanted == "baseline") return Isa::kBaseline;
  throw std::runtime_error(
      "MEGARL_CPU_ISA is '" + wanted +
      "', which this processor or build has not; use baseline, avx2, avx512, avx512bf16 or none");
}

}  // namespace megarl

// The function `name` of the chosen copy. Each copy is a namespace named like its instruction set.
#ifdef MEGARL_X86_LEVELS
#define MEGARL_BEST_COPY(name)                          \
  (machine_isa() == Isa::kAvx512Bf16 ? avx512bf16::name \
   : machine_isa() == Isa::kAvx512   ? avx512::name     \
   : machine_isa() == Isa::kAvx2     ? avx2::name       \
                                     : baseline::name)
#else
#define MEGARL_BEST_COPY(name) ((void)machine_isa(), baseline::name)
#endif
