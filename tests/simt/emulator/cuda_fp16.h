// float16 conversions as CUDA has them: to the nearest, ties to even; every NaN becomes 0x7fff.
#pragma once

#include <cmath>

#include "vector_types.h"

struct __half {
  unsigned short bits;
};
inline __half __ushort_as_half(unsigned short bits) {
  return {bits};
}
inline unsigned short __half_as_ushort(__half x) {
  return x.bits;
}
inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  float y = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(float(fraction), -24);
  if (exponent == 31) y = fraction ? NAN : INFINITY;
  return x.bits >> 15 ? -y : y;
}
inline __half __float2half_rn(float x) {
  if (x != x) return {0x7fff};
  const unsigned sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return {static_cast<unsigned short>(sign | 0x7c00)};
  const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  const auto fraction = static_cast<unsigned>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return {static_cast<unsigned short>(sign | ((exponent + 14) * 1024 + fraction))};
}
