// torch's allocators for CUDA and for pinned memory, over CachingAllocator.
#include <c10/core/AllocatorConfig.h>

#include <cstdlib>
#include <cstring>

#include "caching_allocator.h"
#include "machine.h"

namespace fake_cuda {
namespace {

void give_back(void* context) {
  Locked guard(machine_lock);
  auto block = static_cast<Block*>(context);
  cards[block->device].memory->free(block);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override { return allocate_on(current_device, size); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // the context is not the address
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return !cards.empty(); }
  void emptyCache(c10::MempoolId_t) override {
    Locked guard(machine_lock);
    for (auto& it : cards) it.memory->empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Locked guard(machine_lock);
    if (auto block = block_of(data)) cards[block->device].memory->record_stream(block, queue_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Locked guard(machine_lock);
    return card(device).memory->stats();
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    Locked guard(machine_lock);
    card(device).memory->reset_accumulated_stats();
  }
  void resetPeakStats(DeviceIndex device) override {
    Locked guard(machine_lock);
    card(device).memory->reset_peak_stats();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return usable_card(device).memory->free_and_total();
  }
};

// Page-locked memory of the host. Copies from and to it are made as late as the streams' order allows.
struct PinnedAllocator final : c10::Allocator {
  std::map<const char*, size_t> sizes;

  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, size + 1) == 0, "CUDA error: out of memory (pinned memory of the host)");
    Locked guard(machine_lock);
    sizes[static_cast<const char*>(data)] = size + 1;
    return {data, data, &release, Device(DeviceType::CPU)};
  }
  static void release(void* data);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

DeviceAllocator device;
PinnedAllocator pinned;

void PinnedAllocator::release(void* data) {
  Locked guard(machine_lock);
  pinned.sizes.erase(static_cast<const char*>(data));
  std::free(data);
}

// Settings that torch's CUDA library understands beside those of all devices: known, and of no effect here.
const std::unordered_set<std::string> kCudaKeys = {
    "backend",
    "release_lock_on_cudamalloc",
    "pinned_use_cuda_host_register",
    "graph_capture_record_stream_reuse",
    "pinned_reserve_segment_size_mb",
    "pinned_num_register_threads",
    "per_process_memory_fraction",
    "pinned_free_catch_all",
    "throw_on_cudamalloc_oom",
};

// The environment is read when memory is first asked for, as on a CUDA machine: a program may set it after its start.
void read_settings_once() {
  static bool is_done = false;
  if (std::exchange(is_done, true)) return;
  const char* text = std::getenv("PYTORCH_ALLOC_CONF");
  if (!text) text = std::getenv("PYTORCH_CUDA_ALLOC_CONF");
  if (text) c10::CachingAllocator::setAllocatorSettings(text);
}

}  // namespace

c10::DataPtr allocate_on(DeviceIndex index, size_t size) {
  Card& it = usable_card(index);
  if (size == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, Device(DeviceType::CUDA, index)};
  Locked guard(machine_lock);
  read_settings_once();
  Block* block = it.memory->allocate(size, current_queue(index));
  return {block->data, block, &give_back, Device(DeviceType::CUDA, index)};
}

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &give_back ? static_cast<Block*>(data.get_context()) : nullptr;
}

bool is_pinned(const void* data) {
  Locked guard(machine_lock);
  auto address = static_cast<const char*>(data);
  auto after = pinned.sizes.upper_bound(address);
  if (after == pinned.sizes.begin()) return false;
  --after;
  return address < after->first + after->second;
}

c10::DeviceAllocator* device_allocator() { return &device; }
c10::Allocator* pinned_allocator() { return &pinned; }

void install_allocators() {
  using c10::CachingAllocator::AcceleratorAllocatorConfig;
  AcceleratorAllocatorConfig::registerDeviceConfigParserHook([](const std::string&) {}, kCudaKeys);
  c10::SetAllocator(DeviceType::CUDA, &device, 1);
}

}  // namespace fake_cuda
