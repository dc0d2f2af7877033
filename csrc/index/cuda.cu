#include "../common/cuda.cuh"
#include "position.h"

namespace megarl {
namespace {

constexpr int kThreads = 256, kListThreads = 1024;

__global__ void place_kernel(const IndexArgs a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < a.local) place_token(a, i);
}

// One block lists the labelled rows in order: each warp counts its rows by ballot, the counts are added up in
// order.
__global__ void __launch_bounds__(kListThreads) list_rows_kernel(const IndexArgs a) {
  __shared__ int count_of_warp[kListThreads / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int64_t listed = 0;
  for (int64_t start = 0; start < a.local; start += kListThreads) {
    const int64_t i = start + threadIdx.x;
    const bool labelled = i < a.local && a.labels[i] >= 0;
    const unsigned ballot = __ballot_sync(kAllLanes, labelled);
    if (lane == 0) count_of_warp[warp] = __popc(ballot);
    __syncthreads();
    int before = __popc(ballot & ((1u << lane) - 1)), all = 0;
    for (int w = 0; w < kListThreads / kWarp; ++w) {
      if (w < warp) before += count_of_warp[w];
      all += count_of_warp[w];
    }
    if (labelled) a.rows[listed + before] = i;
    listed += all;
    __syncthreads();
  }
  for (int64_t i = listed + threadIdx.x; i < a.local; i += kListThreads) a.rows[i] = -1;
  if (threadIdx.x == 0) a.row_count[0] = listed;
}

}  // namespace

void index_build_cuda(const IndexArgs& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (args.local) place_kernel<<<blocks_for(args.local, kThreads), kThreads, 0, on>>>(args);
  list_rows_kernel<<<1, kListThreads, 0, on>>>(args);
  check_launch("index_build");
}

}  // namespace megarl
