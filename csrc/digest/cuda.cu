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

// The 16 bytes at byte `shift`, 1 to 15, of two aligned reads.
__device__ __forceinline__ ulonglong2 joined(ulonglong2 first, ulonglong2 second, int shift) {
  const uint64_t low = shift < 8 ? first.x : first.y, middle = shift < 8 ? first.y : second.x;
  const uint64_t high = shift < 8 ? second.x : second.y;
  const int bits = 8 * (shift & 7);
  if (bits == 0) return {low, middle};
  return {low >> bits | middle << (64 - bits), middle >> bits | high << (64 - bits)};
}

// Reads 16 bytes at `offset`, zeros from `end` on.
__device__ __forceinline__ Pair read(const uint8_t* bytes, int64_t end, int64_t offset, int lane) {
  ulonglong2 both{0, 0};
  if (offset + 16 <= end) {
    const int shift = static_cast<int>(offset & 15);
    const auto* aligned = reinterpret_cast<const ulonglong2*>(bytes + (offset - shift));
    both = shift ? joined(aligned[0], aligned[1], shift) : aligned[0];
  } else {
    for (int i = 15; i >= 0; --i) {
      both.y = both.y << 8 | both.x >> 56;
      both.x = both.x << 8 | (offset + i < end ? bytes[offset + i] : 0);
    }
  }
  return lane & 1 ? Pair{both.y, both.x} : Pair{both.x, both.y};
}

// Eight threads hash a leaf, one a lane.
__global__ void __launch_bounds__(kThreads) leaf_digests_kernel(const LeafDigestsArgs a) {
  __shared__ uint64_t secret[kWords];
  __shared__ uint64_t sums[kThreads];
  if (threadIdx.x < kWords) secret[threadIdx.x] = word(kSecret + 8 * threadIdx.x);
  __syncthreads();
  const int lane = threadIdx.x % kLanes, first = threadIdx.x - lane;
  const int64_t leaf = static_cast<int64_t>(blockIdx.x) * kLeaves + threadIdx.x / kLanes;
  uint64_t sum = kStart[lane];
  if (leaf < a.count) {
    const int64_t begin = (a.begins ? a.begins[leaf] : leaf * kLeafBytes) + 8 * (lane & ~1);
    const int64_t end = a.ends ? a.ends[leaf] : a.size;
    const uint64_t scrambling = word(kSecret + kScrambleSecret + 8 * lane);
    for (int block = 0; block < kFullBlocks; ++block) {
      Pair words[kStripesPerBlock];
#pragma unroll
      for (int s = 0; s < kStripesPerBlock; ++s)
        words[s] = read(a.bytes, end, begin + block * kBlockBytes + s * kStripeBytes, lane);
#pragma unroll
      for (int s = 0; s < kStripesPerBlock; ++s)
        sum = accumulate(sum, words[s].own, words[s].neighbour, secret[s + lane]);
      sum = scramble(sum, scrambling);
    }
    for (int s = 0; s < kLastStripes; ++s) {
      const Pair words = read(a.bytes, end, begin + kFullBlocks * kBlockBytes + s * kStripeBytes, lane);
      sum = accumulate(sum, words.own, words.neighbour, secret[s + lane]);
    }
    const Pair words = read(a.bytes, end, begin + kLeafBytes - kStripeBytes, lane);
    sum = accumulate(sum, words.own, words.neighbour, word(kSecret + kLastSecret + 8 * lane));
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (leaf < a.count && lane < 2) {
    const uint64_t half = finish(sums + first, 1 - lane);
    for (int i = 0; i < 8; ++i)
      a.leaves[16 * leaf + 8 * lane + i] = static_cast<uint8_t>(half >> (56 - 8 * i));
  }
}

}  // namespace

void leaf_digests_cuda(const LeafDigestsArgs& a, void* stream) {
  if (a.count == 0) return;
  leaf_digests_kernel<<<blocks_for(a.count, kLeaves), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
  check_launch("leaf_digests");
}

}  // namespace megarl
