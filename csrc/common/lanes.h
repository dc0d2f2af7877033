// Sixteen-lane vectors for the CPU kernels: the compiler's portable vectors, with AVX-512 instructions in the
// copies compiled for them.
//
// Every reduction goes over the lanes in a fixed order. Results then do not depend on the alignment of a row,
// its position in the batch or the number of threads. A file that includes this header is compiled once for
// each instruction set; MEGARL_ISA names the copy. Everything here is inlined, so the linker cannot mix
// copies.
#pragma once

#include <cmath>
#include <cstring>

#include "types.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace megarl {

constexpr int kLanes = 16;

typedef float FloatLanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UIntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint16_t ShortLanes __attribute__((vector_size(2 * kLanes)));
typedef double DoubleLanes __attribute__((vector_size(8 * kLanes)));

template <class A, int kWidth>
struct Vector {
  typedef A type __attribute__((vector_size(sizeof(A) * kWidth)));
};

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

MEGARL_HD FloatLanes load_lanes(const float* p) {
  return load_raw<FloatLanes>(p);
}
MEGARL_HD DoubleLanes load_lanes(const double* p) {
  return load_raw<DoubleLanes>(p);
}
MEGARL_HD void store_lanes(float* p, FloatLanes v) {
  std::memcpy(p, &v, sizeof(v));
}
MEGARL_HD void store_lanes(double* p, DoubleLanes v) {
  std::memcpy(p, &v, sizeof(v));
}

#ifdef __AVX512F__

MEGARL_HD FloatLanes load_lanes(const BFloat16* p) {
  return bit_cast<FloatLanes>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_raw<__m256i>(p)), 16));
}
MEGARL_HD FloatLanes load_lanes(const Float16* p) {
  return _mm512_cvtph_ps(load_raw<__m256i>(p));
}

// Rounds to nearest even. A NaN stays a NaN: the NaNs that occur here have no low mantissa bits that could
// carry into the exponent.
MEGARL_HD void store_lanes(BFloat16* p, FloatLanes v) {
#ifdef __AVX512BF16__
  const __m256bh out = _mm512_cvtneps_pbh(v);
#else
  const UIntLanes bits = bit_cast<UIntLanes>(v);
  const UIntLanes rounded = bits + (((bits >> 16) & 1u) + 0x7fffu);
  const __m256i out = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bit_cast<__m512i>(rounded), 16));
#endif
  std::memcpy(p, &out, sizeof(out));
}
MEGARL_HD void store_lanes(Float16* p, FloatLanes v) {
  const __m256i out = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &out, sizeof(out));
}

MEGARL_HD FloatLanes max_lanes(FloatLanes v, FloatLanes best) {
  return _mm512_max_ps(v, best);
}

#else

MEGARL_HD FloatLanes load_lanes(const BFloat16* p) {
  return bit_cast<FloatLanes>(__builtin_convertvector(load_raw<ShortLanes>(p), UIntLanes) << 16);
}

// Converts half to float by a multiplication with 2^112, which also normalises subnormal halves.
MEGARL_HD FloatLanes load_lanes(const Float16* p) {
  const UIntLanes h = __builtin_convertvector(load_raw<ShortLanes>(p), UIntLanes);
  const UIntLanes sign = (h & 0x8000u) << 16;
  const UIntLanes magnitude = (h & 0x7fffu) << 13;
  const UIntLanes scaled = bit_cast<UIntLanes>(bit_cast<FloatLanes>(magnitude) * 0x1p112f);
  const UIntLanes special = magnitude | 0x7f800000u;  // infinity and NaN keep their mantissa
  return bit_cast<FloatLanes>(sign | (bit_cast<IntLanes>(magnitude) >= 0x0f800000 ? special : scaled));
}

MEGARL_HD void store_lanes(BFloat16* p, FloatLanes v) {
  const UIntLanes bits = bit_cast<UIntLanes>(v);
  const UIntLanes rounded = (bits + (((bits >> 16) & 1u) + 0x7fffu)) >> 16;
  const ShortLanes out = __builtin_convertvector(rounded, ShortLanes);
  std::memcpy(p, &out, sizeof(out));
}

MEGARL_HD void store_lanes(Float16* p, FloatLanes v) {
  const UIntLanes bits = bit_cast<UIntLanes>(v);
  const UIntLanes sign = (bits >> 16) & 0x8000u;
  const UIntLanes magnitude = bits & 0x7fffffffu;
  const UIntLanes normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const FloatLanes aligned = bit_cast<FloatLanes>(magnitude) + 0.5f;  // puts a subnormal half's bits lowest
  const UIntLanes subnormal = bit_cast<UIntLanes>(aligned) - 0x3f000000u;
  const IntLanes signed_magnitude = bit_cast<IntLanes>(magnitude);
  UIntLanes half = signed_magnitude < 0x38800000 ? subnormal : normal;
  half = signed_magnitude >= 0x47800000 ? UIntLanes{} + 0x7c00u : half;
  half = v != v ? UIntLanes{} + 0x7e00u : half;
  const ShortLanes out = __builtin_convertvector(half | sign, ShortLanes);
  std::memcpy(p, &out, sizeof(out));
}

// Lane-wise maximum that ignores NaN in `v`.
MEGARL_HD FloatLanes max_lanes(FloatLanes v, FloatLanes best) {
  return v > best ? v : best;
}

#endif

MEGARL_HD DoubleLanes max_lanes(DoubleLanes v, DoubleLanes best) {
  return v > best ? v : best;
}

// 2^r for |r| <= 1/2 by a minimax polynomial of this degree. The relative error is below 8e-8 for degree 6.
// Degree 5 has 2.2e-7, negligible beside the rounding of 16-bit logits. Degree 4 has 2.7e-6, negligible
// beside the rounding of a 16-bit result.
template <int kDegree, class V>
MEGARL_HD V exp2_fraction(V r) {
  if (kDegree == 4) {
    V p = 9.5701017e-3f * r + 5.5917863e-2f;
    p = p * r + 2.4024745e-1f;
    p = p * r + 6.9312181e-1f;
    return p * r + 9.9999926e-1f;
  }
  if (kDegree == 5) {
    V p = 1.3276472e-3f * r + 9.6755413e-3f;
    p = p * r + 5.5507133e-2f;
    p = p * r + 2.4022120e-1f;
    p = p * r + 6.9314697e-1f;
    return p * r + 1.0f;
  }
  V p = 1.5345812e-4f * r + 1.3399931e-3f;
  p = p * r + 9.6184890e-3f;
  p = p * r + 5.5503288e-2f;
  p = p * r + 2.4022647e-1f;
  p = p * r + 6.9314721e-1f;
  return p * r + 1.0f;
}

// 2^w for w <= 127, as 2^n 2^r with n the nearest integer. Exactly 0 for -infinity and on underflow, NaN for
// NaN. On return `w` is bounded below, so that 2^w * w is 0 wherever 2^w is 0.
#ifdef __AVX512F__
template <int kDegree>
MEGARL_HD FloatLanes exp2_lanes(FloatLanes& w) {
  w = _mm512_max_ps(_mm512_set1_ps(-160.0f), w);  // returns the second operand if that is NaN
  const FloatLanes n = _mm512_roundscale_ps(w, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(exp2_fraction<kDegree>(w - n), n);
}
#else
template <int kDegree, class V>
MEGARL_HD V exp2_lanes(V& w) {
  using Ints = typename Vector<int32_t, sizeof(V) / 4>::type;
  using UInts = typename Vector<uint32_t, sizeof(V) / 4>::type;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Ints in_range = ~(w < -125.0f);
  w = w < -125.0f ? V{} - 125.0f : w;
  const V shifted = w + kMagic;
  const V p = exp2_fraction<kDegree>(w - (shifted - kMagic));
  const UInts scale = (bit_cast<UInts>(shifted) + (127u - 0x4b400000u)) << 23;
  return bit_cast<V>(bit_cast<Ints>(p * bit_cast<V>(scale)) & in_range);
}
#endif

template <int kDegree>
MEGARL_HD DoubleLanes exp2_lanes(DoubleLanes& w) {
  DoubleLanes e;
  for (int i = 0; i < kLanes; ++i) {
    if (w[i] < -1100.0) w[i] = -1100.0;
    e[i] = std::exp2(w[i]);
  }
  return e;
}

// Adds by halves: lane i and lane i + width, until one lane is left.
template <class A, int kWidth = kLanes>
MEGARL_HD A horizontal_sum(typename Vector<A, kWidth>::type v) {
  if constexpr (kWidth == 2) {
    return v[0] + v[1];
  } else {
    using Half = typename Vector<A, kWidth / 2>::type;
    Half halves[2];
    std::memcpy(halves, &v, sizeof(v));
    return horizontal_sum<A, kWidth / 2>(halves[0] + halves[1]);
  }
}

// Lane i of the result equals horizontal_sum(v[i]) to the bit. May overwrite `v`.
#ifdef __AVX512F__
template <int kWidth = kLanes / 2>
MEGARL_HD FloatLanes horizontal_sums(FloatLanes (&v)[kLanes]) {
  IntLanes own,
      other;  // of each lane: in the first of two vectors where its bit kWidth is 0, else in the second
  for (int i = 0; i < kLanes; ++i) {
    own[i] = i & kWidth ? i + kLanes : i;
    other[i] = (i ^ kWidth) + (i & kWidth ? kLanes : 0);
  }
  for (int i = 0; i < kWidth; ++i)
    v[i] = __builtin_shuffle(v[i], v[i + kWidth], own) + __builtin_shuffle(v[i], v[i + kWidth], other);
  if constexpr (kWidth > 1) return horizontal_sums<kWidth / 2>(v);
  return v[0];
}
#else
MEGARL_HD FloatLanes horizontal_sums(const FloatLanes (&v)[kLanes]) {
  float sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = horizontal_sum<float>(v[i]);
  return load_lanes(sums);
}
#endif

// Maximum over the lanes, without NaN lanes.
template <class A>
MEGARL_HD A horizontal_max(lanes_t<A> v) {
  A best = static_cast<A>(-INFINITY);
  for (int i = 0; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

template <class T>
MEGARL_HD T minus_infinity() {
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

// Loads the last, incomplete group of lanes: `count` elements, then -infinity.
template <class T>
MEGARL_HD lanes_t<accumulator_t<T>> load_tail(const T* p, int count) {
  T buffer[kLanes];
  for (int i = 0; i < kLanes; ++i) buffer[i] = i < count ? p[i] : minus_infinity<T>();
  return load_lanes(buffer);
}

template <class T>
MEGARL_HD void store_tail(T* p, lanes_t<accumulator_t<T>> v, int count) {
  T buffer[kLanes];
  store_lanes(buffer, v);
  std::memcpy(p, buffer, count * sizeof(T));
}

// Floats in a register of this copy. The compiler would keep wider vectors in memory.
#if defined(__AVX512F__)
constexpr int kRegister = kLanes;
#elif defined(__AVX2__)
constexpr int kRegister = kLanes / 2;
#else
constexpr int kRegister = kLanes / 4;
#endif
using Register = Vector<float, kRegister>::type;

// Loads the vector at `i` of n elements, filled up with `pad` after the last one.
template <class V = FloatLanes>
MEGARL_HD V load_padded(const float* x, int64_t i, int64_t n, float pad) {
  constexpr int kWidth = sizeof(V) / sizeof(float);
  if (i + kWidth <= n) return load_raw<V>(x + i);
  float buffer[kWidth];
  for (int k = 0; k < kWidth; ++k) buffer[k] = i + k < n ? x[i + k] : pad;
  return load_raw<V>(buffer);
}

template <class V>
MEGARL_HD void store_group(float* x, int64_t i, int64_t n, V v) {
  constexpr int64_t kWidth = sizeof(V) / sizeof(float);
  std::memcpy(x + i, &v, (i + kWidth <= n ? kWidth : n - i) * sizeof(float));
}

}  // namespace megarl
