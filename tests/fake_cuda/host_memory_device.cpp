// A CUDA device in host memory, for a torch without CUDA. Its tensors are real tensors of device cuda:0:
// torch and its autograd treat them as such. A kernel of the device is the CPU's, on the same memory. Streams
// and events are no-ops.
//
// Must be loaded before `import torch`, which looks for the hooks once.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace at {

struct CUDAHooks final : CUDAHooksInterface {  // torch finds the hooks by this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace {

using at::Tensor;

struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::kCUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(getDevice()); }
  c10::Stream getDefaultStream(c10::Device) const override { return getStream(getDevice()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return getStream(getDevice()); }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(getDevice()); }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, OneDevice)

// Returns storage on `device` with the memory of `other`, which stays alive with it.
c10::Storage storage_on(c10::Device device, const c10::Storage& other) {
  auto release = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::DataPtr memory(const_cast<void*>(other.data()), new c10::Storage(other), release, device);
  return {c10::Storage::use_byte_size_t(), other.nbytes(), std::move(memory), c10::GetCPUAllocator(), true};
}

Tensor tensor_in(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

Tensor on_host(const Tensor& tensor) {
  return tensor_in(storage_on(c10::kCPU, tensor.storage()), c10::DispatchKey::CPU, tensor);
}

// Tensors and storages of one call: those of the device, and the same memory on the host.
struct Call {
  std::vector<std::pair<Tensor, Tensor>> pairs;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;
  bool to_host = false;  // the caller asked for a result on the host

  Tensor argument(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (const auto& [device, host] : pairs)
      if (device.is_same(tensor)) return host;
    pairs.emplace_back(tensor, on_host(tensor));
    return pairs.back().second;
  }

  c10::Storage argument(const c10::Storage& storage) {
    if (storage.device_type() != c10::kCUDA) return storage;
    storages.emplace_back(storage, storage_on(c10::kCPU, storage));
    return storages.back().second;
  }

  c10::Storage device_storage(const c10::Storage& host) const {
    for (const auto& [own, alias] : storages)
      if (alias.is_alias_of(host)) return own;
    return storage_on({c10::kCUDA, 0}, host);
  }

  Tensor result(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (const auto& [device, host] : pairs) {
      if (host.is_same(tensor)) return device;
      if (host.storage().is_alias_of(tensor.storage()))
        return tensor_in(device.storage(), c10::DispatchKey::CUDA, tensor);
    }
    if (to_host) return tensor;
    return tensor_in(device_storage(tensor.storage()), c10::DispatchKey::CUDA, tensor);
  }

  // Carries over a new shape or new memory that the kernel gave to an argument.
  void update_arguments() {
    for (const auto& [device, host] : pairs) {
      auto* impl = device.unsafeGetTensorImpl();
      if (host.storage().data() != device.storage().data() ||
          host.storage().nbytes() != device.storage().nbytes())
        impl->set_storage_keep_dtype(device_storage(host.storage()));
      if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
          host.storage_offset() != device.storage_offset())
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }
};

template <class Convert>
c10::IValue converted(const c10::IValue& value, const Convert& convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<Tensor>(convert(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call;
  const size_t count = op.schema().arguments().size();
  const size_t first = stack->size() - count;
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isDevice()) {
      call.to_host = value.toDevice().is_cpu();
      value = c10::Device(c10::kCPU);
    } else if (value.isStorage()) {
      value = call.argument(value.toStorage());
    } else {
      value = converted(value, [&](const Tensor& tensor) { return call.argument(tensor); });
    }
  }
  op.callBoxed(stack);
  call.update_arguments();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
    (*stack)[i] = converted((*stack)[i], [&](const Tensor& tensor) { return call.result(tensor); });
}

// `UntypedStorage.resize_`, which torch builds for a device only with its toolkit.
void resize(c10::Storage storage, int64_t size) {
  const size_t bytes = static_cast<size_t>(size);
  auto memory = storage_on({c10::kCUDA, 0}, c10::Storage({}, bytes, c10::GetCPUAllocator(), true));
  if (const size_t kept = std::min(bytes, storage.nbytes()))
    std::memcpy(memory.mutable_data(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory.mutable_data_ptr()));
  storage.set_nbytes(bytes);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY(fake_cuda, library) {
  library.def("resize(Storage storage, int size) -> ()", &resize);
  library.def("on_host(Tensor tensor) -> Tensor", [](const Tensor& tensor) { return on_host(tensor); });
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl(
      "copy_",
      torch::CppFunction::makeFromBoxedFunction<&run_on_host>());  // the kernels of attention differ by
                                                                   // device: 0 is plain matrix products
  library.impl("_fused_sdp_choice",
               [](const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                  std::optional<double>, bool) -> int64_t { return 0; });
}
