// Sixteen-lane vectors for the CPU kernels, in the compiler's portable vector extension.
//
// Every reduction runs over lanes in one written order, so that a result does not depend on the alignment of a
// row, its position in a batch or the number of threads. MEGARL_MULTIARCH compiles a function once for each x86
// level and picks at load time; functions called from it must be inlined into it to profit.
#pragma once

#include <cmath>
#include <cstring>

#include "types.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(MEGARL_SANITIZE)
#define MEGARL_MULTIARCH __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MEGARL_MULTIARCH
#endif

namespace megarl {

constexpr int kLanes = 16;

typedef float FloatLanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UIntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint16_t ShortLanes __attribute__((vector_size(2 * kLanes)));
typedef double DoubleLanes __attribute__((vector_size(8 * kLanes)));

template <class A>
struct LanesOf;
template <>
struct LanesOf<float> {
  using type = FloatLanes;
};
template <>
struct LanesOf<double> {
  using type = DoubleLanes;
};
template <class A>
using lanes_t = typename LanesOf<A>::type;

template <class To, class From>
MEGARL_HD To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class V>
MEGARL_HD V load_raw(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

MEGARL_HD FloatLanes load_lanes(const float* p) { return load_raw<FloatLanes>(p); }
MEGARL_HD DoubleLanes load_lanes(const double* p) { return load_raw<DoubleLanes>(p); }

MEGARL_HD FloatLanes load_lanes(const BFloat16* p) {
  return bit_cast<FloatLanes>(__builtin_convertvector(load_raw<ShortLanes>(p), UIntLanes) << 16);
}

// Half to float by a multiplication with 2^112, which also normalises subnormal halves.
MEGARL_HD FloatLanes load_lanes(const Float16* p) {
  const UIntLanes h = __builtin_convertvector(load_raw<ShortLanes>(p), UIntLanes);
  const UIntLanes sign = (h & 0x8000u) << 16;
  const UIntLanes magnitude = (h & 0x7fffu) << 13;
  const UIntLanes scaled = bit_cast<UIntLanes>(bit_cast<FloatLanes>(magnitude) * 0x1p112f);
  const UIntLanes special = magnitude | 0x7f800000u;  // infinity and NaN keep their mantissa
  return bit_cast<FloatLanes>(sign | (bit_cast<IntLanes>(magnitude) >= 0x0f800000 ? special : scaled));
}

MEGARL_HD void store_lanes(float* p, FloatLanes v) { std::memcpy(p, &v, sizeof(v)); }
MEGARL_HD void store_lanes(double* p, DoubleLanes v) { std::memcpy(p, &v, sizeof(v)); }

// Round to nearest even; NaN becomes the quiet NaN.
MEGARL_HD void store_lanes(BFloat16* p, FloatLanes v) {
  const UIntLanes bits = bit_cast<UIntLanes>(v);
  const UIntLanes rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const UIntLanes nan = UIntLanes{} + 0x7fc0u;
  const ShortLanes out = __builtin_convertvector(v != v ? nan : rounded, ShortLanes);
  std::memcpy(p, &out, sizeof(out));
}

MEGARL_HD void store_lanes(Float16* p, FloatLanes v) {
  const UIntLanes bits = bit_cast<UIntLanes>(v);
  const UIntLanes sign = (bits >> 16) & 0x8000u;
  const UIntLanes magnitude = bits & 0x7fffffffu;
  const UIntLanes normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const FloatLanes aligned = bit_cast<FloatLanes>(magnitude) + 0.5f;  // a subnormal half's bits end up lowest
  const UIntLanes subnormal = bit_cast<UIntLanes>(aligned) - 0x3f000000u;
  const IntLanes signed_magnitude = bit_cast<IntLanes>(magnitude);
  UIntLanes half = signed_magnitude < 0x38800000 ? subnormal : normal;
  half = signed_magnitude >= 0x47800000 ? UIntLanes{} + 0x7c00u : half;
  half = v != v ? UIntLanes{} + 0x7e00u : half;
  const ShortLanes out = __builtin_convertvector(half | sign, ShortLanes);
  std::memcpy(p, &out, sizeof(out));
}

// 2^v for v <= 127; exactly 0 below -125 (-infinity included), NaN for NaN. Relative error below 8e-8:
// 2^v = 2^n 2^r with n the nearest integer and |r| <= 1/2, and 2^r by a degree-6 minimax polynomial.
MEGARL_HD FloatLanes exp2_lanes(FloatLanes v) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const IntLanes in_range = ~(v < -125.0f);
  v = v < -125.0f ? FloatLanes{} - 125.0f : v;
  const FloatLanes shifted = v + kMagic;
  const FloatLanes r = v - (shifted - kMagic);
  FloatLanes p = 1.5345812e-4f * r + 1.3399931e-3f;
  p = p * r + 9.6184890e-3f;
  p = p * r + 5.5503288e-2f;
  p = p * r + 2.4022647e-1f;
  p = p * r + 6.9314721e-1f;
  p = p * r + 1.0f;
  const IntLanes scale = (bit_cast<IntLanes>(shifted) + (127 - 0x4b400000)) << 23;
  return bit_cast<FloatLanes>(bit_cast<IntLanes>(p * bit_cast<FloatLanes>(scale)) & in_range);
}

MEGARL_HD DoubleLanes exp2_lanes(DoubleLanes v) {
  for (int i = 0; i < kLanes; ++i) v[i] = std::exp2(v[i]);
  return v;
}

template <class A>
MEGARL_HD A horizontal_sum(lanes_t<A> v) {
  A lane[kLanes];
  std::memcpy(lane, &v, sizeof(v));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

// The greatest lane; NaN lanes are passed over.
template <class A>
MEGARL_HD A horizontal_max(lanes_t<A> v) {
  A best = static_cast<A>(-INFINITY);
  for (int i = 0; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// The last, incomplete group of lanes: `count` elements, the others `fill` bits.
template <class T>
MEGARL_HD lanes_t<accumulator_t<T>> load_tail(const T* p, int count, T fill) {
  T buffer[kLanes];
  for (int i = 0; i < kLanes; ++i) buffer[i] = i < count ? p[i] : fill;
  return load_lanes(buffer);
}

template <class T>
MEGARL_HD void store_tail(T* p, lanes_t<accumulator_t<T>> v, int count) {
  T buffer[kLanes];
  store_lanes(buffer, v);
  std::memcpy(p, buffer, count * sizeof(T));
}

template <class T>
MEGARL_HD T minus_infinity();
template <>
MEGARL_HD float minus_infinity<float>() {
  return -INFINITY;
}
template <>
MEGARL_HD double minus_infinity<double>() {
  return -INFINITY;
}
template <>
MEGARL_HD BFloat16 minus_infinity<BFloat16>() {
  return {0xff80};
}
template <>
MEGARL_HD Float16 minus_infinity<Float16>() {
  return {0xfc00};
}

}  // namespace megarl
