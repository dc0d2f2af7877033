// Compiled once for each instruction set; MEGARL_ISA is the namespace of this copy.
#include "rows.h"

#include <cmath>

#include "../../common/lanes.h"
#include "../../common/row_math.h"

namespace megarl {
namespace {

constexpr float kToBase2 = static_cast<float>(kLog2E);

// 1 / rms(x) of x [n].
MEGARL_HD float inverse_rms(const float* x, int64_t n, float eps) {
  Register squares = {};
  int64_t i = 0;
  for (; i + kRegister <= n; i += kRegister) squares += load_raw<Register>(x + i) * load_raw<Register>(x + i);
  float sum = horizontal_sum<float, kRegister>(squares);
  for (; i < n; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
}

void add_norm(const AddNormArgs& a, int64_t row) {
  float* residual = a.residual + row * a.width;
  if (a.update) {
    const float* update = a.update + row * a.width;
    for (int64_t i = 0; i < a.width; ++i) residual[i] += update[i];
  }
  const float scale = inverse_rms(residual, a.width, a.eps);
  float* out = a.out + row * a.width;
  for (int64_t i = 0; i < a.width; ++i) out[i] = residual[i] * scale * a.weight[i];
}

// Half a head is a whole number of half vectors.
constexpr int kHalf = kLanes / 2;
using HalfLanes = Vector<float, kHalf>::type;

// Normalises one head in place, then rotates its halves.
MEGARL_HD void norm_and_rotate(float* x, int64_t dim, const float* norm, float eps, const float* cos_sin) {
  const float scale = norm ? inverse_rms(x, dim, eps) : 1.0f;
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kHalf) {
    HalfLanes low = load_raw<HalfLanes>(x + i), high = load_raw<HalfLanes>(x + i + half);
    if (norm) {
      low = low * scale * load_raw<HalfLanes>(norm + i);
      high = high * scale * load_raw<HalfLanes>(norm + i + half);
    }
    const HalfLanes cos = load_raw<HalfLanes>(cos_sin + i), sin = load_raw<HalfLanes>(cos_sin + i + half);
    const HalfLanes turned_low = low * cos - high * sin, turned_high = high * cos + low * sin;
    std::memcpy(x + i, &turned_low, sizeof(turned_low));
    std::memcpy(x + i + half, &turned_high, sizeof(turned_high));
  }
}

void rotate_store(const RotateStoreArgs& a, int64_t row) {
  const int64_t kv_width = a.kv_heads * a.dim;
  float* queries = a.qkv + row * (a.heads * a.dim + 2 * kv_width);
  float* keys = queries + a.heads * a.dim;
  const float* cos_sin = a.cos_sin + a.positions[row] * a.dim;
  for (int64_t h = 0; h < a.heads; ++h) norm_and_rotate(queries + h * a.dim, a.dim, a.q_norm, a.eps, cos_sin);
  for (int64_t h = 0; h < a.kv_heads; ++h) norm_and_rotate(keys + h * a.dim, a.dim, a.k_norm, a.eps, cos_sin);
  std::memcpy(a.keys + a.slots[row] * kv_width, keys, kv_width * sizeof(float));
  std::memcpy(a.values + a.slots[row] * kv_width, keys + kv_width, kv_width * sizeof(float));
}

MEGARL_HD Register load_register(const float* p) {
  return load_raw<Register>(p);
}
template <class T>
MEGARL_HD FloatLanes load_register(const T* p) {
  return load_lanes(p);
}
MEGARL_HD void store_register(float* p, Register v) {
  std::memcpy(p, &v, sizeof(v));
}
template <class T>
MEGARL_HD void store_register(T* p, FloatLanes v) {
  store_lanes(p, v);
}

// Computes scores [n] = keys . query * scale. Key j is at keys + slots[j] * stride.
template <class T>
MEGARL_HD void dot_products(const T* query, const T* keys, const int32_t* slots, int64_t stride, int64_t n,
                            int64_t dim, float scale, float* scores) {
  using V = decltype(load_register(query));
  constexpr int kWidth = sizeof(V) / sizeof(float);
  for (int64_t start = 0; start < n; start += kLanes) {
    const int count = n - start < kLanes ? static_cast<int>(n - start) : kLanes;
    V sums[kLanes] = {};
    for (int j = 0; j < count; ++j) {
      const T* key = keys + slots[start + j] * stride;
      V sum = {};
      for (int64_t i = 0; i < dim; i += kWidth) sum += load_register(query + i) * load_register(key + i);
      sums[j] = sum;
    }
    if constexpr (kWidth == kLanes) {
      store_lanes(scores + start, horizontal_sums(sums) * scale);
    } else {
      for (int j = 0; j < count; ++j) scores[start + j] = horizontal_sum<float, kWidth>(sums[j]) * scale;
    }
  }
}

// Replaces scores [n] by weights not yet divided by their sum, and returns the sum.
MEGARL_HD float exponentials(float* scores, int64_t n) {
  FloatLanes best = FloatLanes{} - INFINITY;
  const int64_t whole = (n + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = n; i < whole; ++i) scores[i] = -INFINITY;
  for (int64_t i = 0; i < whole; i += kLanes) best = max_lanes(load_lanes(scores + i), best);
  const float max = horizontal_max<float>(best);
  FloatLanes sum = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    FloatLanes w = (load_lanes(scores + i) - max) * kToBase2;
    const FloatLanes e = exp2_lanes<6>(w);
    store_lanes(scores + i, e);
    sum += e;
  }
  return horizontal_sum<float>(sum);
}

template <class T>
void paged_attention(const PagedAttentionArgs& a, int64_t row, float* scores) {
  const int64_t end = a.positions[row] + 1;
  const int64_t begin = a.window > 0 && end > a.window ? end - a.window : 0;
  const int64_t stride = a.kv_heads * a.dim, group = a.heads / a.kv_heads;
  const int32_t* slots = a.table + a.requests[row] * a.table_width + begin;
  const int64_t visible = end - begin;
  for (int64_t h = 0; h < a.heads; ++h) {
    const T* query = static_cast<const T*>(a.queries) + row * a.query_stride + h * a.dim;
    const T* keys = static_cast<const T*>(a.keys) + h / group * a.dim;
    const T* values = static_cast<const T*>(a.values) + h / group * a.dim;
    T* out = static_cast<T*>(a.out) + (row * a.heads + h) * a.dim;
    dot_products(query, keys, slots, stride, visible, a.dim, a.scale, scores);
    const float scale = 1.0f / exponentials(scores, visible);
    using V = decltype(load_register(values));
    for (int64_t i = 0; i < a.dim; i += sizeof(V) / sizeof(float)) {
      V even = {}, odd = {};
      for (int64_t j = 0; j + 1 < visible; j += 2) {
        even += load_register(values + slots[j] * stride + i) * scores[j];
        odd += load_register(values + slots[j + 1] * stride + i) * scores[j + 1];
      }
      if (visible % 2) even += load_register(values + slots[visible - 1] * stride + i) * scores[visible - 1];
      store_register(out + i, (even + odd) * scale);
    }
  }
}

void silu_mul(const SiluMulArgs& a, int64_t row) {
  const float* gate = a.gate_up + row * 2 * a.width;
  const float* up = gate + a.width;
  float* out = a.out + row * a.width;
  for (int64_t i = 0; i < a.width; i += kRegister) {
    const Register g = load_padded<Register>(gate, i, a.width, 0),
                   u = load_padded<Register>(up, i, a.width, 0);
    Register w = g * -kToBase2;
    w = w > 126.0f ? Register{} + 126.0f : w;  // the limit of exp2_lanes; silu is 0 there
    store_group(out, i, a.width, g / (1.0f + exp2_lanes<6>(w)) * u);
  }
}

void sample(const SampleArgs& a, int64_t row) {
  float* x = a.logits + row * a.vocab;
  const float scale = kToBase2 / a.temperature[row];
  FloatLanes best = FloatLanes{} - INFINITY;
  for (int64_t i = 0; i < a.vocab; i += kLanes) best = max_lanes(load_padded(x, i, a.vocab, -INFINITY), best);
  const float max = horizontal_max<float>(best);
  double sum = 0;
  for (int64_t i = 0; i < a.vocab; i += kLanes) {
    FloatLanes w = (load_padded(x, i, a.vocab, -INFINITY) - max) * scale;
    const FloatLanes weight = exp2_lanes<6>(w);
    sum += horizontal_sum<float>(weight);
    store_group(x, i, a.vocab, weight);
  }
  a.tokens[row] = 0;
  a.logprobs[row] = NAN;
  if (!(sum > 0 && sum < INFINITY)) return;
  // Finds the group of lanes in which the running sum, in the order above, passes the target; then the token.
  const double target = a.uniform[row] * sum;
  double passed = 0;
  int64_t chosen = -1;
  for (int64_t i = 0; i < a.vocab; i += kLanes) {
    const double before = passed;
    passed += horizontal_sum<float>(load_padded(x, i, a.vocab, 0));
    if (passed == before || (passed <= target && i + kLanes < a.vocab)) continue;
    double run = before;
    for (int64_t k = i; k < a.vocab && k < i + kLanes && (chosen < i || run <= target); ++k) {
      run += x[k];
      if (x[k] > 0) chosen = k;
    }
    if (passed > target) break;
  }
  a.tokens[row] = static_cast<int32_t>(chosen);
  a.logprobs[row] = static_cast<float>(std::log(static_cast<double>(x[chosen]) / sum));
}

}  // namespace

namespace MEGARL_ISA {

DecodeKernels decode_kernels() {
  return {add_norm,
          rotate_store,
          {paged_attention<float>, paged_attention<BFloat16>, paged_attention<Float16>},
          silu_mul,
          sample};
}

}  // namespace MEGARL_ISA
}  // namespace megarl
