// torch's door to streams, events and the current device.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace fake_cuda {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  static c10::DeviceIndex index_of(Device device);  // the current one for "cuda"

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device getDevice() const override;
  void setDevice(Device to) const override;
  void uncheckedSetDevice(Device to) const noexcept override;
  Device exchangeDevice(Device to) const override;
  c10::DeviceIndex deviceCount() const noexcept override;

  c10::Stream getStream(Device device) const override;
  c10::Stream getDefaultStream(Device device) const override;
  c10::Stream getStreamFromGlobalPool(Device device, bool is_high_priority) const override;
  c10::Stream getNewStream(Device device, int priority) const override;
  c10::Stream exchangeStream(c10::Stream stream) const override;
  void* getStreamNativeHandle(const c10::Stream stream) const override;
  bool isStreamCapturing(const c10::Stream& stream) const;  // an override from torch 2.12 on
  bool queryStream(const c10::Stream& stream) const override;
  void synchronizeStream(const c10::Stream& stream) const override;
  void synchronizeDevice(c10::DeviceIndex device) const override;
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device, c10::EventFlag flag) const override;
  void block(void* event, const c10::Stream& stream) const override;
  bool queryEvent(void* event) const override;
  void synchronizeEvent(void* event) const override;
  void destroyEvent(void* event, c10::DeviceIndex device) const noexcept override;
  double elapsedTime(void* first, void* second, c10::DeviceIndex device) const override;
};

}  // namespace fake_cuda
