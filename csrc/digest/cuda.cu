#include "../common/cuda.cuh"
#include "xxh3.cuh"

namespace megarl {
namespace {

using namespace xxh3;

constexpr int kThreads = 256, kLeaves = kThreads / kLanes;  // of a block
constexpr int kWords = kStripesPerBlock + kLanes;           // of the secret that whole stripes use

struct Pair {  // the words of a lane and of its neighbour
  uint64_t own, neighbour;
};

// Reads 16 bytes at `offset`, zeros behind the tensor's end.
__device__ __forceinline__ Pair read(const LeafDigestsArgs& a, int64_t offset, int lane) {
  ulonglong2 both{0, 0};
  if (offset + 16 <= a.size) {
    both = *reinterpret_cast<const ulonglong2*>(a.bytes + offset);
  } else {
    for (int i = 15; i >= 0; --i) {
      both.y = both.y << 8 | both.x >> 56;
      both.x = both.x << 8 | (offset + i < a.size ? a.bytes[offset + i] : 0);
    }
  }
  return lane & 1 ? Pair{both.y, both.x} : Pair{both.x, both.y};
}

// Eight threads hash a leaf, one a lane.
__global__ void __launch_bounds__(kThreads) leaf_digests_kernel(const LeafDigestsArgs a, int64_t leaves) {
  __shared__ uint64_t secret[kWords];
  __shared__ uint64_t sums[kThreads];
  if (threadIdx.x < kWords) secret[threadIdx.x] = word(kSecret + 8 * threadIdx.x);
  __syncthreads();
  const int lane = threadIdx.x % kLanes, first = threadIdx.x - lane;
  const int64_t leaf = static_cast<int64_t>(blockIdx.x) * kLeaves + threadIdx.x / kLanes;
  uint64_t sum = kStart[lane];
  if (leaf < leaves) {
    const int64_t begin = leaf * kLeafBytes + 8 * (lane & ~1);
    const uint64_t scrambling = word(kSecret + kScrambleSecret + 8 * lane);
    for (int block = 0; block < kFullBlocks; ++block) {
      Pair words[kStripesPerBlock];
#pragma unroll
      for (int s = 0; s < kStripesPerBlock; ++s)
        words[s] = read(a, begin + block * kBlockBytes + s * kStripeBytes, lane);
#pragma unroll
      for (int s = 0; s < kStripesPerBlock; ++s)
        sum = accumulate(sum, words[s].own, words[s].neighbour, secret[s + lane]);
      sum = scramble(sum, scrambling);
    }
    for (int s = 0; s < kLastStripes; ++s) {
      const Pair words = read(a, begin + kFullBlocks * kBlockBytes + s * kStripeBytes, lane);
      sum = accumulate(sum, words.own, words.neighbour, secret[s + lane]);
    }
    const Pair words = read(a, begin + kLeafBytes - kStripeBytes, lane);
    sum = accumulate(sum, words.own, words.neighbour, word(kSecret + kLastSecret + 8 * lane));
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (leaf < leaves && lane < 2) {
    const uint64_t half = finish(sums + first, 1 - lane);
    for (int i = 0; i < 8; ++i)
      a.leaves[16 * leaf + 8 * lane + i] = static_cast<uint8_t>(half >> (56 - 8 * i));
  }
}

}  // namespace

void leaf_digests_cuda(const LeafDigestsArgs& a, void* stream) {
  const int64_t leaves = (a.size + kLeafBytes - 1) / kLeafBytes;
  if (leaves == 0) return;
  leaf_digests_kernel<<<blocks_for(leaves, kLeaves), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      a, leaves);
  check_launch("leaf_digests");
}

}  // namespace megarl
