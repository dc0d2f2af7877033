// Runs CUDA kernels on the CPU: the threads of a block are fibers, and barriers and warp collectives switch
// between them. simt_build.py rewrites launches, __shared__ variables and inline PTX; all else stays as it
// is.
//
// Stricter than a GPU: a thread that has ended is missing at every later barrier. Not emulated: dynamic
// shared memory, atomics, races between two barriers within one instruction, memory of several devices.
#pragma once

#include <math.h>  // its float overloads are global, as in CUDA
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "vector_types.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

constexpr int kWarpSize = 32, kMaxThreads = 1024, kDevices = 8;
constexpr size_t kStackBytes = 256 << 10, kSharedBytes = 48 << 10, kGuardBytes = 512;

enum class Order : int { kAscending, kDescending, kRandom };
enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kEnded };

// A barrier in the source. Threads meet only at the same one.
struct Barrier {
  const char* name;
  const char* file;
  int line;

  bool operator==(const Barrier& b) const {
    return line == b.line && !strcmp(file, b.file) && !strcmp(name, b.name);
  }
  std::string text() const { return std::string(name) + " at " + file + ":" + std::to_string(line); }
};

struct Fiber {
  State state = State::kEnded;
  uint3 index{};
  int rank = 0;
  Barrier barrier{};
  unsigned mask = 0;
  int source = 0;  // lane that a shuffle reads
  uint64_t value = 0, result = 0;
  char* stack = nullptr;
  bool started = false;
  jmp_buf context;
};

// One __shared__ variable of the running block, between guard words that the end of the block checks.
struct Shared {
  const void* tag;
  const char* name;
  size_t bytes;
  std::unique_ptr<char[]> memory;
};

struct Launched {
  std::string kernel;
  int device;
};

struct Machine {
  Order order = Order::kAscending;
  std::mt19937 random{0};
  int poison = 0xff;

  int device = 0;
  CUstream_st streams[kDevices] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
  cudaError_t error = cudaSuccess;
  std::vector<Launched> launches;

  std::vector<Fiber> fibers;
  int threads = 0;
  Fiber* current = nullptr;
  jmp_buf scheduler;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
  const char* kernel = "";
  std::string failure;
  std::vector<Shared> shared;
  std::mutex one_launch;

  void run_grid(dim3 grid, dim3 block);
  void run_block();
  bool run_warp(int warp);
  void release_warp(int warp);
  bool release_block();
  void resume(Fiber& fiber);
  void yield();
  void give_stack(Fiber& fiber);
  void start(Fiber& fiber);
  void end_of_block();
  std::vector<int> ordered(int begin, int end);
  std::string divergence() const;
  [[noreturn]] void fail(const std::string& text);
  void* shared_memory(const void* tag, const char* name, size_t bytes);
  uint64_t meet_warp(const Barrier& barrier, unsigned mask, int source, uint64_t value);
  void meet_block(const Barrier& barrier);
};

inline Machine machine;

template <class V>
V& shared_memory(const void* tag, const char* name) {
  return *static_cast<V*>(machine.shared_memory(tag, name, sizeof(V)));
}

inline void enter(const char* kernel) {
  machine.kernel = kernel;
}

// kernel<<<grid, block, shared, stream>>>(arguments) is rewritten to launch(kernel, grid, ...)(arguments).
template <class... P>
struct Launch {
  void (*kernel)(P...);
  dim3 grid, block;
  cudaStream_t stream;

  void operator()(P... arguments) const {
    const std::lock_guard<std::mutex> lock(machine.one_launch);
    const size_t threads = size_t(block.x) * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || !threads || threads > kMaxThreads) {
      machine.error = cudaErrorInvalidConfiguration;
    } else if (stream && stream->device != machine.device) {
      machine.error = cudaErrorInvalidResourceHandle;
    } else {
      auto call = std::make_pair(kernel, std::tuple<P...>(arguments...));
      machine.arguments = &call;
      machine.body = [](void* at) {
        auto& [function, values] = *static_cast<decltype(call)*>(at);
        std::apply(function, values);
      };
      machine.run_grid(grid, block);
    }
  }
};

template <class... P>
Launch<P...> launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared = 0,
                    cudaStream_t stream = nullptr) {
  if (shared) throw std::runtime_error("dynamic shared memory is not emulated");
  return {kernel, grid, block, stream};
}

template <class T>
T shuffle(const Barrier& barrier, unsigned mask, T value, int source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = machine.meet_warp(barrier, mask, source, bits);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

inline void sync_warp(const Barrier& barrier, unsigned mask = 0xffffffffu) {
  machine.meet_warp(barrier, mask, 0, 0);
}

inline int lane() {
  return machine.current->rank % kWarpSize;
}

// Lanes that the shuffles read, in a warp of segments of `width` lanes. Past a segment's end a lane reads
// itself.
inline int lane_of(int source, int width = kWarpSize) {
  return lane() / width * width + source % width;
}
inline int lane_up(int delta, int width = kWarpSize) {
  return lane() % width < delta ? lane() : lane() - delta;
}
inline int lane_down(int delta, int width = kWarpSize) {
  return lane() % width + delta >= width ? lane() : lane() + delta;
}
inline int lane_xor(int other, int width = kWarpSize) {
  return (lane() ^ other) / width > lane() / width ? lane() : lane() ^ other;
}

namespace ptx {

// Off by up to 2 units in the last place, as a hash of the input says: no result may depend on more accuracy.
inline void ex2_approx_ftz_f32(float& y, float x) {
  y = fabsf(x) < 0x1p-126f ? 1.0f : exp2f(x);
  uint32_t bits, key;
  memcpy(&key, &x, 4);
  memcpy(&bits, &y, 4);
  const uint32_t exponent = bits >> 23;
  if (exponent == 0) bits = 0;
  if (exponent > 1 && exponent < 0xfe && y != 1) bits += (key * 2654435761u >> 8) % 5 - 2;
  memcpy(&y, &bits, 4);
}

}  // namespace ptx
}  // namespace simt

#define SIMT_BARRIER(name)   \
  simt::Barrier {            \
    name, __FILE__, __LINE__ \
  }
#define __syncthreads() simt::machine.meet_block(SIMT_BARRIER("__syncthreads"))
#define __syncwarp(...) simt::sync_warp(SIMT_BARRIER("__syncwarp"), ##__VA_ARGS__)
#define __ballot_sync(mask, predicate) \
  static_cast<unsigned>(simt::machine.meet_warp(SIMT_BARRIER("__ballot_sync"), mask, -1, (predicate) != 0))
#define __shfl_sync(mask, value, ...) \
  simt::shuffle(SIMT_BARRIER("__shfl_sync"), mask, value, simt::lane_of(__VA_ARGS__))
#define __shfl_up_sync(mask, value, ...) \
  simt::shuffle(SIMT_BARRIER("__shfl_up_sync"), mask, value, simt::lane_up(__VA_ARGS__))
#define __shfl_down_sync(mask, value, ...) \
  simt::shuffle(SIMT_BARRIER("__shfl_down_sync"), mask, value, simt::lane_down(__VA_ARGS__))
#define __shfl_xor_sync(mask, value, ...) \
  simt::shuffle(SIMT_BARRIER("__shfl_xor_sync"), mask, value, simt::lane_xor(__VA_ARGS__))
