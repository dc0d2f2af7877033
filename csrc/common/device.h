// The current CUDA device during a kernel's launch. C++ files may include it; only cuda.cu needs CUDA's
// headers.
#pragma once

namespace megarl {

// Makes `device` current, and at its end the device that was current before. A stream of another device than
// the current one cannot launch; stream 0 would launch on the wrong device.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_, before_;
};

}  // namespace megarl
