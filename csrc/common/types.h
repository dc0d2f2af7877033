// Element types of the kernels' tensors, and the macro for functions that CPU and CUDA share.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#ifdef __CUDACC__
#define MEGARL_HD __host__ __device__ __forceinline__
#else
#define MEGARL_HD inline __attribute__((always_inline))
#endif

namespace megarl {

// The codes are shared with megarl/ops/native.py.
enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

// Storage of the 16-bit floats. Arithmetic is in float.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Calls fn with a null pointer of the element type, so that one generic lambda serves every dtype.
template <class Fn>
void dispatch_dtype(int dtype, const char* op, Fn&& fn) {
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat32:
      return fn(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return fn(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return fn(static_cast<Float16*>(nullptr));
    case DType::kFloat64:
      return fn(static_cast<double*>(nullptr));
  }
  throw std::invalid_argument(std::string(op) + ": dtype code " + std::to_string(dtype) +
                              " is not one of 0..3");
}

// Type of row statistics: float, or double for double tensors.
template <class T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <class T>
using accumulator_t = typename Accumulator<T>::type;

}  // namespace megarl
