// Making, resizing and aliasing tensors of a card: what touches storages and not what is in them.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <cstring>

#include "machine.h"
#include "torch_device.h"

namespace fake_cuda {
namespace {

using c10::IntArrayRef;
constexpr c10::DispatchKeySet kCudaKeys(c10::DispatchKey::CUDA);

DeviceIndex index_of(const std::optional<Device>& device) {
  return Guard::index_of(device.value_or(Device(DeviceType::CUDA)));
}

template <typename Make>
Tensor make_on(DeviceIndex index, Make make) {
  card(index);
  auto before = std::exchange(current_device, index);
  auto back = c10::make_scope_exit([before] { current_device = before; });
  return make();
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return make_on(index_of(device), [&] {
    return at::detail::empty_generic(size, device_allocator(), kCudaKeys, c10::dtype_or_default(dtype), format);
  });
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return make_on(index_of(device), [&] {
    return at::detail::empty_strided_generic(size, stride, device_allocator(), kCudaKeys, c10::dtype_or_default(dtype));
  });
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto needed = at::detail::computeStorageNbytesContiguous(size, self.element_size(), self.storage_offset());
  if (needed > self.storage().nbytes()) {
    auto fresh = allocate_on(self.device().index(), needed);
    if (self.storage().nbytes()) std::memcpy(fresh.get(), storage_start(self), self.storage().nbytes());
    self.storage().set_data_ptr(std::move(fresh));
    self.storage().set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set_source(Tensor& self, c10::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  c10::DimVector contiguous;
  if (stride.empty() && !size.empty()) {
    contiguous = c10::contiguous_strides(size);
    stride = contiguous;
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage) {
  std::vector<int64_t> size{static_cast<int64_t>(storage.nbytes() / self.element_size())}, stride{1};
  return set_source(self, std::move(storage), 0, size, stride);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_source(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  std::vector<int64_t> size{0}, stride{1};
  c10::Storage storage(c10::Storage::use_byte_size_t{}, 0, allocate_on(self.device().index(), 0), device_allocator(),
                       true);
  return set_source(self, std::move(storage), 0, size, stride);
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
}

}  // namespace

Tensor host_view(const Tensor& tensor) {
  if (!is_on_card(tensor)) return tensor;
  if (tensor.is_sparse())
    return at::_sparse_coo_tensor_unsafe(host_view(tensor._indices()), host_view(tensor._values()), tensor.sizes(),
                                         tensor.options().device(Device(DeviceType::CPU)), tensor.is_coalesced());
  c10::Storage storage(c10::Storage::use_byte_size_t{}, tensor.storage().nbytes(),
                       c10::DataPtr(storage_start(tensor), Device(DeviceType::CPU)), c10::GetAllocator(DeviceType::CPU),
                       true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

void note_tensor_access(const Tensor& tensor, Queue* queue, uint64_t tick, bool is_write, const std::string& by) {
  if (tensor.is_sparse()) {
    note_tensor_access(tensor._indices(), queue, tick, is_write, by);
    note_tensor_access(tensor._values(), queue, tick, is_write, by);
  } else if (auto block = block_of(tensor.storage().data_ptr())) {
    note_access(block->uses, queue, tick, is_write, by);
  }
}

}  // namespace fake_cuda
