// Compiled once for each instruction set; MEGARL_ISA is the namespace of this copy.
#include "rows.h"

#include <cmath>
#include <cstring>

#include "../../common/lanes.h"
#include "../../common/row_math.h"

namespace megarl {
namespace {

constexpr int kTile = 8;      // rows of a product computed at once, one register each
constexpr int kQueries = 64;  // queries of a head in a block; their weights stay in the second-level cache

MEGARL_HD int64_t padded(int64_t n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

// Computes out [kTile, columns] = a . b, or += with kAdd. Element (row, k) of a is a[row * row_step + k *
// k_step], b is [depth, columns]. columns is a multiple of kLanes.
template <bool kAdd>
MEGARL_HD void product(const float* a, int64_t row_step, int64_t k_step, const float* b, int64_t b_stride,
                       int64_t depth, int64_t columns, float* out, int64_t out_stride) {
  for (int64_t i = 0; i < columns; i += kRegister) {
    Register sums[kTile] = {};
    if (kAdd)
      for (int r = 0; r < kTile; ++r) sums[r] = load_raw<Register>(out + r * out_stride + i);
    for (int64_t k = 0; k < depth; ++k) {
      const Register column = load_raw<Register>(b + k * b_stride + i);
      for (int r = 0; r < kTile; ++r) sums[r] += column * a[r * row_step + k * k_step];
    }
    for (int r = 0; r < kTile; ++r) std::memcpy(out + r * out_stride + i, &sums[r], sizeof(Register));
  }
}

// One sequence and one head of keys and values.
struct Part {
  const PackedAttentionShape& s;
  const int64_t* rows;
  int64_t length, skipped, kv_head, group;
  int64_t keys, dim;  // length and dim, padded to whole lanes

  MEGARL_HD Part(const PackedAttentionShape& shape, int64_t sequence, int64_t head)
      : s(shape),
        rows(shape.rows + shape.cu_seqlens[sequence]),
        length(shape.cu_seqlens[sequence + 1] - shape.cu_seqlens[sequence]),
        skipped(shape.skipped[sequence]),
        kv_head(head),
        group(shape.heads / shape.kv_heads),
        keys(padded(length)),
        dim(padded(shape.dim)) {}

  // Gathers the rows of keys or values to [keys, dim], and transposes them to [dim, keys]. Padding is 0.
  MEGARL_HD void gather(const float* from, float* out) const {
    for (int64_t j = 0; j < keys; ++j) {
      std::memset(out + j * dim, 0, dim * sizeof(float));
      if (j < length)
        std::memcpy(out + j * dim, from + (rows[j] * s.kv_heads + kv_head) * s.dim, s.dim * sizeof(float));
    }
  }
  MEGARL_HD void transpose(const float* gathered, float* out) const {
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = 0; i < dim; ++i) out[i * keys + j] = gathered[j * dim + i];
  }
  MEGARL_HD int64_t at(int64_t query, int64_t head) const {
    return rows[query] * s.heads + kv_head * group + head;
  }
  // Gathers queries (or gradients of outputs) first .. first + count, times `scale`, to [count padded to
  // whole tiles, dim].
  MEGARL_HD void gather_queries(const float* from, int64_t head, int64_t first, int64_t count, float scale,
                                float* out) const {
    std::memset(out, 0, (count + kTile - 1) / kTile * kTile * dim * sizeof(float));
    for (int64_t q = 0; q < count; ++q) {
      const float* row = from + at(first + q, head) * s.dim;
      for (int64_t i = 0; i < s.dim; ++i) out[q * dim + i] = row[i] * scale;
    }
  }
};

// Replaces scores [seen] by weights 2^(scores - shift), fills with 0 up to `columns`, and returns the sum.
MEGARL_HD float exponentials(float* scores, int64_t seen, int64_t columns, float shift) {
  Register sum = {};
  for (int64_t j = seen; j < columns; ++j) scores[j] = -INFINITY;
  for (int64_t j = 0; j < columns; j += kRegister) {
    Register w = load_raw<Register>(scores + j) - shift;
    const Register e = exp2_lanes<6>(w);
    std::memcpy(scores + j, &e, sizeof(e));
    sum += e;
  }
  return horizontal_sum<float, kRegister>(sum);
}

MEGARL_HD float greatest(const float* scores, int64_t n) {
  Register best = Register{} - INFINITY;
  int64_t j = 0;
  for (; j + kRegister <= n; j += kRegister) {
    const Register v = load_raw<Register>(scores + j);
    best = v > best ? v : best;
  }
  float max = -INFINITY;
  for (int i = 0; i < kRegister; ++i) max = best[i] > max ? best[i] : max;
  for (; j < n; ++j) max = scores[j] > max ? scores[j] : max;
  return max;
}

int64_t forward_floats(int64_t length, int64_t dim) {
  return 2 * padded(length) * padded(dim) + kQueries * padded(dim) + kTile * (padded(length) + padded(dim));
}

void forward(const PackedAttentionArgs& a, int64_t sequence, int64_t kv_head, float* scratch) {
  const Part p(a.shape, sequence, kv_head);
  float *keys = scratch, *values = keys + p.keys * p.dim, *queries = values + p.keys * p.dim;
  float *scores = queries + kQueries * p.dim, *out = scores + kTile * p.keys;
  p.gather(a.shape.key, values);
  p.transpose(values, keys);
  p.gather(a.shape.value, values);
  const float scale = a.shape.scale * static_cast<float>(kLog2E);
  for (int64_t head = 0; head < p.group; ++head)
    for (int64_t first = p.skipped; first < p.length; first += kQueries) {
      const int64_t count = p.length - first < kQueries ? p.length - first : kQueries;
      p.gather_queries(a.shape.query, head, first, count, scale, queries);
      for (int64_t tile = 0; tile < count; tile += kTile) {
        const int64_t here = count - tile < kTile ? count - tile : kTile;
        const int64_t seen = padded(first + tile + here);  // keys up to the tile's last query
        product<false>(queries + tile * p.dim, p.dim, 1, keys, p.keys, p.s.dim, seen, scores, p.keys);
        float inverse[kTile];
        for (int64_t r = 0; r < here; ++r) {
          const int64_t query = first + tile + r;
          const float max = greatest(scores + r * p.keys, query + 1);
          const float sum = exponentials(scores + r * p.keys, query + 1, seen, max);
          inverse[r] = 1.0f / sum;
          a.log_sums[p.at(query, head)] = max + std::log2(sum);
        }
        product<false>(scores, p.keys, 1, values, p.dim, first + tile + here, p.dim, out, p.dim);
        for (int64_t r = 0; r < here; ++r) {
          float* to = a.out + p.at(first + tile + r, head) * p.s.dim;
          for (int64_t i = 0; i < p.s.dim; ++i) to[i] = out[r * p.dim + i] * inverse[r];
        }
      }
    }
}

int64_t backward_floats(int64_t length, int64_t dim) {
  const int64_t keys = padded(length), wide = padded(dim);
  return 6 * keys * wide + 2 * kQueries * (wide + keys) + kTile * wide;
}

// With weights P = exp(S - log sum) and dP = dO V^T:  dV = P^T dO,  dS = P (dP - rowsum(P dP)),  dQ = dS K,
// dK = dS^T Q.
void backward(const PackedAttentionBackwardArgs& a, int64_t sequence, int64_t kv_head, float* scratch) {
  const Part p(a.shape, sequence, kv_head);
  const int64_t size = p.keys * p.dim;
  float *keys = scratch, *keys_t = keys + size, *values_t = keys_t + size, *grad_keys = values_t + size;
  float *grad_values = grad_keys + size, *queries = grad_values + size, *grads = queries + kQueries * p.dim;
  float *weights = grads + kQueries * p.dim, *slopes = weights + kQueries * p.keys;
  float* out = slopes + kQueries * p.keys;
  p.gather(a.shape.value, keys);
  p.transpose(keys, values_t);
  p.gather(a.shape.key, keys);
  p.transpose(keys, keys_t);
  std::memset(grad_keys, 0, 2 * size * sizeof(float));
  const float scale = a.shape.scale * static_cast<float>(kLog2E);
  for (int64_t head = 0; head < p.group; ++head)
    for (int64_t first = p.skipped; first < p.length; first += kQueries) {
      const int64_t count = p.length - first < kQueries ? p.length - first : kQueries;
      p.gather_queries(a.shape.query, head, first, count, scale, queries);
      p.gather_queries(a.grad, head, first, count, 1.0f, grads);
      for (int64_t tile = 0; tile < count; tile += kTile) {
        const int64_t here = count - tile < kTile ? count - tile : kTile;
        const int64_t seen = padded(first + tile + here);
        float *w = weights + tile * p.keys, *d = slopes + tile * p.keys;
        product<false>(queries + tile * p.dim, p.dim, 1, keys_t, p.keys, p.s.dim, seen, w, p.keys);
        product<false>(grads + tile * p.dim, p.dim, 1, values_t, p.keys, p.s.dim, seen, d, p.keys);
        for (int64_t r = 0; r < here; ++r, w += p.keys, d += p.keys) {
          // Weights of later keys are 0, as far as the block's last query sees, because product() reads them
          // all.
          const int64_t query = first + tile + r, end = padded(first + count);
          exponentials(w, query + 1, seen, a.log_sums[p.at(query, head)]);
          Register pulls = {};
          for (int64_t j = 0; j < seen; j += kRegister)
            pulls += load_raw<Register>(w + j) * load_raw<Register>(d + j);
          const float pull = horizontal_sum<float, kRegister>(pulls);
          for (int64_t j = 0; j < seen; j += kRegister)
            store_group(d, j, seen, load_raw<Register>(w + j) * (load_raw<Register>(d + j) - pull));
          std::memset(w + seen, 0, (end - seen) * sizeof(float));
          std::memset(d + seen, 0, (end - seen) * sizeof(float));
        }
        product<false>(slopes + tile * p.keys, p.keys, 1, keys, p.dim, first + tile + here, p.dim, out,
                       p.dim);
        for (int64_t r = 0; r < here; ++r) {
          float* to = a.grad_query + p.at(first + tile + r, head) * p.s.dim;
          for (int64_t i = 0; i < p.s.dim; ++i) to[i] = out[r * p.dim + i] * a.shape.scale;
        }
      }
      for (int64_t key = 0; key < first + count; key += kTile) {
        const int64_t from = key > first ? (key - first) : 0;  // first query that sees a key of the tile
        const int64_t depth = count - from, at = from * p.keys + key;
        product<true>(slopes + at, 1, p.keys, queries + from * p.dim, p.dim, depth, p.dim,
                      grad_keys + key * p.dim, p.dim);
        product<true>(weights + at, 1, p.keys, grads + from * p.dim, p.dim, depth, p.dim,
                      grad_values + key * p.dim, p.dim);
      }
    }
  const int64_t start = p.rows - a.shape.rows;
  for (int64_t j = 0; j < p.length; ++j) {
    float* to_key = a.grad_keys + ((start + j) * p.s.kv_heads + kv_head) * p.s.dim;
    for (int64_t i = 0; i < p.s.dim; ++i) to_key[i] = grad_keys[j * p.dim + i] * static_cast<float>(kLn2);
    std::memcpy(a.grad_values + ((start + j) * p.s.kv_heads + kv_head) * p.s.dim, grad_values + j * p.dim,
                p.s.dim * sizeof(float));
  }
}

}  // namespace

namespace MEGARL_ISA {

AttentionKernels attention_kernels() {
  return {forward, forward_floats, backward, backward_floats};
}

}  // namespace MEGARL_ISA
}  // namespace megarl
