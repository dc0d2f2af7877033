#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "device.h"

namespace megarl {
namespace {

void check(cudaError_t error, const std::string& action) {
  if (error != cudaSuccess) throw std::runtime_error(action + ": " + cudaGetErrorString(error));
}

}  // namespace

DeviceGuard::DeviceGuard(int device) : device_(device) {
  check(cudaGetDevice(&before_), "current CUDA device");
  if (device_ != before_) check(cudaSetDevice(device_), "CUDA device " + std::to_string(device_));
}

DeviceGuard::~DeviceGuard() {
  if (device_ != before_) cudaSetDevice(before_);  // it was current before, so this cannot fail
}

}  // namespace megarl
