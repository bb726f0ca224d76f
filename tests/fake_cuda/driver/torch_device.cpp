// What torch's core asks of a device library: the guard with its streams and events, CUDA's hooks, generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "caching_allocator.h"
#include "generator.h"
#include "machine.h"
#include "torch_device.h"

namespace fake_cuda {
namespace {

constexpr int kPoolStreams = 32;  // beyond so many, torch hands out the same streams again

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex device) : CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = Device(DeviceType::CUDA, device);
  }
};

}  // namespace

at::Generator make_generator(DeviceIndex device) { return at::make_generator<Generator>(device); }

Device Guard::getDevice() const { return {DeviceType::CUDA, current_device}; }

void Guard::setDevice(Device to) const {
  card(to.index());
  current_device = to.index();
}

void Guard::uncheckedSetDevice(Device to) const noexcept { current_device = to.index(); }

Device Guard::exchangeDevice(Device to) const {
  auto before = getDevice();
  setDevice(to);
  return before;
}

DeviceIndex Guard::deviceCount() const noexcept { return static_cast<DeviceIndex>(cards.size()); }

DeviceIndex Guard::index_of(Device device) { return device.has_index() ? device.index() : current_device; }

c10::Stream Guard::getStream(Device device) const {
  return stream_at(index_of(device), current_stream_id(index_of(device)));
}

c10::Stream Guard::getDefaultStream(Device device) const { return stream_at(index_of(device), 0); }

c10::Stream Guard::getStreamFromGlobalPool(Device device, bool) const { return getNewStream(device, 0); }

c10::Stream Guard::getNewStream(Device device, int) const {
  Locked guard(machine_lock);
  Card& it = usable_card(index_of(device));
  if (it.queues.size() <= kPoolStreams) new_queue(it);
  it.newest_pool_queue = it.newest_pool_queue % kPoolStreams + 1;
  return stream_at(it.index, it.newest_pool_queue);
}

c10::Stream Guard::exchangeStream(c10::Stream stream) const {
  auto before = getStream(stream.device());
  current_stream_id(stream.device_index()) = static_cast<int>(stream.id());
  return before;
}

void* Guard::getStreamNativeHandle(const c10::Stream stream) const { return queue_of(stream); }

void Guard::destroyEvent(void* event, DeviceIndex) const noexcept { delete static_cast<Event*>(event); }

void Guard::record(void** event, const c10::Stream& stream, DeviceIndex device, c10::EventFlag flag) const {
  Locked guard(machine_lock);
  auto index = stream.device_index();
  TORCH_CHECK(device == -1 || device == index, "Event device index ", static_cast<int>(device),
              " does not match recording stream's device index ", static_cast<int>(index), ".");
  usable_card(index);
  if (!*event) *event = new Event;
  *static_cast<Event*>(*event) = record_event(queue_of(stream), flag == c10::EventFlag::BACKEND_DEFAULT);
}

void Guard::block(void* event, const c10::Stream& stream) const {
  Locked guard(machine_lock);
  if (event) wait_for(queue_of(stream), *static_cast<Event*>(event));
}

bool Guard::queryEvent(void* event) const {
  Locked guard(machine_lock);
  if (!event) return true;
  auto& it = *static_cast<Event*>(event);
  check_not_lost(card(it.queue->device));
  return is_over(it);
}

void Guard::synchronizeEvent(void* event) const {
  if (!event) return;
  Event copy;
  {
    Locked guard(machine_lock);
    copy = *static_cast<Event*>(event);
  }
  synchronize(copy);
}

bool Guard::isStreamCapturing(const c10::Stream& stream) const {
  usable_card(stream.device_index());
  return false;
}

bool Guard::queryStream(const c10::Stream& stream) const {
  Locked guard(machine_lock);
  check_not_lost(card(stream.device_index()));
  Queue* queue = queue_of(stream);
  return queue->busy_until_ns <= now_ns() && is_over(record_event(queue));
}

void Guard::synchronizeStream(const c10::Stream& stream) const {
  tell_of_wait();
  synchronize(queue_of(stream));
}

void Guard::synchronizeDevice(DeviceIndex device) const { synchronize_card(device); }

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  device_allocator()->recordStream(data, stream);
}

double Guard::elapsedTime(void* first, void* second, DeviceIndex) const {
  Locked guard(machine_lock);
  auto from = static_cast<Event*>(first), to = static_cast<Event*>(second);
  TORCH_CHECK_VALUE(from && to, "Both events must be recorded before calculating elapsed time.");
  TORCH_CHECK_VALUE(from->is_timed && to->is_timed, "Both events must be created with argument 'enable_timing=True'.");
  if (std::max(from->at_ns, to->at_ns) > now_ns()) raise_cuda_error(600, "cudaErrorNotReady", "device not ready");
  return static_cast<double>(to->at_ns - from->at_ns) / 1e6;
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace {

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !cards.empty(); }
  bool hasCUDA() const override { return !cards.empty(); }
  bool hasPrimaryContext(DeviceIndex index) const override { return has_context(index); }
  DeviceIndex current_device() const override { return fake_cuda::current_device; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(cards.size()); }
  int getNumGPUs() const override { return static_cast<int>(cards.size()); }
  void setCurrentDevice(DeviceIndex to) const override { Guard().setDevice({DeviceType::CUDA, to}); }
  DeviceIndex getCurrentDevice() const override { return fake_cuda::current_device; }
  DeviceIndex exchangeDevice(DeviceIndex to) const override {
    return to < 0 ? DeviceIndex(-1) : Guard().exchangeDevice({DeviceType::CUDA, to}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchangeDevice(to); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  Device getDeviceFromPtr(void*) const override { return {DeviceType::CUDA, fake_cuda::current_device}; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return card(index < 0 ? fake_cuda::current_device : index).generator;
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator(index < 0 ? fake_cuda::current_device : index);
  }
  void deviceSynchronize(DeviceIndex index) const override { synchronize_card(index); }
  std::string showConfig() const override { return "simulated CUDA"; }
  long versionCUDART() const override { return 13000; }
};

}  // namespace
}  // namespace fake_cuda

namespace at {
namespace {
C10_REGISTER_TYPED_CREATOR(CUDAHooksRegistry, std::string("CUDAHooks"),
                           [](CUDAHooksArgs args) -> std::unique_ptr<CUDAHooksInterface> {
                             return std::make_unique<fake_cuda::Hooks>(args);
                           })
}  // namespace
}  // namespace at
