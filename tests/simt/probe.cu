// Kernels that try the emulator: its collectives, its indices, and each fault that it must notice.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <functional>
#include <map>
#include <stdexcept>
#include <string>

#include "../common/advantage_math.h"

namespace {

constexpr unsigned kAll = 0xffffffffu;

__global__ void collectives(int* out) {
  const int lane = threadIdx.x % 32, value = 100 + lane;
  int* row = out + 8 * threadIdx.x;
  row[0] = __shfl_sync(kAll, value, 3);
  row[1] = __shfl_up_sync(kAll, value, 2);
  row[2] = __shfl_down_sync(kAll, value, 5);
  row[3] = __shfl_xor_sync(kAll, value, 6);
  row[4] = __shfl_sync(kAll, value, 1, 8);
  row[5] = __shfl_up_sync(kAll, value, 3, 8);
  row[6] = __shfl_down_sync(kAll, value, 3, 8);
  row[7] = static_cast<int>(__ballot_sync(kAll, lane % 3 == 0));
}

// The halves of a warp go their own ways, each with a mask of its own, and meet again.
__global__ void halves(int* out) {
  const int lane = threadIdx.x % 32;
  int sum = lane;
  if (lane < 16) {
    for (int i = 1; i < 16; i *= 2) sum += __shfl_xor_sync(0x0000ffffu, sum, i);
  } else {
    sum = static_cast<int>(__ballot_sync(0xffff0000u, lane % 2));
  }
  __syncwarp();
  out[threadIdx.x] = __shfl_xor_sync(kAll, sum, 16);
}

__global__ void transpose(int* out) {
  __shared__ int tile[4][33];
  const int column = threadIdx.x, row = threadIdx.y;
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  tile[row][column] = 1000 * block + 32 * row + column;
  __syncthreads();
  const int i = row * 32 + column;
  out[128 * block + i] = tile[i % 4][i / 4];
}

__global__ void lost_barrier(int* out) {
  __shared__ int values[64];
  values[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = values[(threadIdx.x + 32) % 64];
}

__global__ void unwritten_shared(float* out) {
  __shared__ float values[32];
  if (threadIdx.x != 9) values[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void past_shared(int* out) {
  __shared__ int values[32];
  values[threadIdx.x + 1] = 1;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void too_much_shared(int* out) {
  __shared__ int values[12289];
  values[threadIdx.x] = 1;
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void ended_before_barrier(int* out) {
  if (threadIdx.x >= 40 && threadIdx.x != 50) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void two_barriers(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

__global__ void absent_lane(int* out) {
  if (threadIdx.x != 5) out[threadIdx.x] = __shfl_down_sync(kAll, 1, 1);
}

__global__ void wrong_mask(int* out) {
  out[threadIdx.x] = static_cast<int>(__ballot_sync(0x7fffffffu, 1));
}

__global__ void unnamed_source(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 7, 20);
}

__global__ void past_the_end(int* out) {
  out[threadIdx.x] = out[threadIdx.x + 1];
}

__global__ void convert(const float* x, float* out, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x[i]));
  out[4 * i] = y;
  out[4 * i + 1] = __half2float(__float2half_rn(x[i]));
  out[4 * i + 2] =
      __uint_as_float(static_cast<unsigned>(__bfloat16_as_ushort(__float2bfloat16_rn(x[i]))) << 16);
  out[4 * i + 3] = __half2float(__ushort_as_half(static_cast<unsigned short>(i)));
}

// maps [n, 2, 5] = (p, q, c, sets_value, value) and states [n, 2] to both orders of application, out [n, 4].
void compose_and_apply(const double* in, double* out, int n) {
  for (int i = 0; i < n; ++i, in += 12, out += 4) {
    const megarl::GaeMap earlier{in[0], in[1], in[2], in[3] != 0, in[4]},
        later{in[5], in[6], in[7], in[8] != 0, in[9]};
    const megarl::GaeState state{in[10], in[11]};
    const megarl::GaeState once = apply(compose(earlier, later), state),
                           twice = apply(earlier, apply(later, state));
    out[0] = once.advantage;
    out[1] = once.value;
    out[2] = twice.advantage;
    out[3] = twice.value;
  }
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

const std::map<std::string, std::function<void(int*)>> kProbes{
    {"collectives", [](int* out) { collectives<<<1, 64>>>(out); }},
    {"halves", [](int* out) { halves<<<1, 32>>>(out); }},
    {"transpose", [](int* out) { transpose<<<dim3(3, 2, 2), dim3(32, 4)>>>(out); }},
    {"lost_barrier", [](int* out) { lost_barrier<<<1, 64>>>(out); }},
    {"unwritten_shared", [](int* out) { unwritten_shared<<<1, 32>>>(reinterpret_cast<float*>(out)); }},
    {"past_shared", [](int* out) { past_shared<<<1, 32>>>(out); }},
    {"too_much_shared", [](int* out) { too_much_shared<<<1, 32>>>(out); }},
    {"ended_before_barrier", [](int* out) { ended_before_barrier<<<dim3(2, 3), 64>>>(out); }},
    {"two_barriers", [](int* out) { two_barriers<<<1, 64>>>(out); }},
    {"absent_lane", [](int* out) { absent_lane<<<1, 64>>>(out); }},
    {"wrong_mask", [](int* out) { wrong_mask<<<1, 32>>>(out); }},
    {"unnamed_source", [](int* out) { unnamed_source<<<1, 32>>>(out); }},
    {"past_the_end", [](int* out) { past_the_end<<<1, 32>>>(out); }},
    {"too_many_threads", [](int* out) { collectives<<<1, 1025>>>(out); }},
};

}  // namespace

// Runs a kernel under a schedule. Returns the error, or an empty text.
extern "C" __attribute__((visibility("default"))) const char* probe(const char* name, int order,
                                                                    unsigned seed, int poison, int* out) {
  static std::string error;
  simt::machine.order = static_cast<simt::Order>(order);
  simt::machine.random.seed(seed);
  simt::machine.poison = poison;
  try {
    kProbes.at(name)(out);
    check(cudaGetLastError());
    error.clear();
  } catch (const std::exception& e) {
    error = e.what();
  }
  return error.c_str();
}

extern "C" __attribute__((visibility("default"))) void probe_convert(const float* x, float* out, int n) {
  convert<<<(n + 255) / 256, 256>>>(x, out, n);
}

extern "C" __attribute__((visibility("default"))) void probe_compose(const double* in, double* out, int n) {
  compose_and_apply(in, out, n);
}
