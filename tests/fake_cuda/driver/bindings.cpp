// The Python module fake_cuda_driver: what torch._C._cuda_* of a CUDA build offers, and what tests ask of the cards.
#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <pybind11/stl.h>

#include <cstring>

#include "caching_allocator.h"
#include "machine.h"
#include "tensors.h"
#include "torch_device.h"

namespace py = pybind11;

namespace fake_cuda {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

py::dict as_dict(const Stat& stat) {
  py::dict found;
  found["current"] = stat.current;
  found["peak"] = stat.peak;
  found["allocated"] = stat.allocated;
  found["freed"] = stat.freed;
  return found;
}

py::dict as_dict(const StatArray& stats) {
  py::dict found;
  found["all"] = as_dict(stats[0]);
  found["small_pool"] = as_dict(stats[1]);
  found["large_pool"] = as_dict(stats[2]);
  return found;
}

// As torch._C._cuda_memoryStats.
py::dict memory_stats(DeviceIndex device) {
  auto stats = device_allocator()->getDeviceStats(device);
  py::dict found;
  found["num_alloc_retries"] = stats.num_alloc_retries;
  found["num_ooms"] = stats.num_ooms;
  found["max_split_size"] = stats.max_split_size;
  found["num_sync_all_streams"] = stats.num_sync_all_streams;
  found["num_device_alloc"] = stats.num_device_alloc;
  found["num_device_free"] = stats.num_device_free;
  found["num_oom_rejections"] = stats.num_oom_rejections;
  found["allocated_bytes"] = as_dict(stats.allocated_bytes);
  found["reserved_bytes"] = as_dict(stats.reserved_bytes);
  found["active_bytes"] = as_dict(stats.active_bytes);
  found["inactive_split_bytes"] = as_dict(stats.inactive_split_bytes);
  found["requested_bytes"] = as_dict(stats.requested_bytes);
  found["reserved_bytes_by_private_pools"] = py::dict();
  found["allocation"] = as_dict(stats.allocation);
  found["segment"] = as_dict(stats.segment);
  found["active"] = as_dict(stats.active);
  found["inactive_split"] = as_dict(stats.inactive_split);
  found["oversize_allocations"] = as_dict(stats.oversize_allocations);
  found["oversize_segments"] = as_dict(stats.oversize_segments);
  return found;
}

const char* state_of(const c10::CachingDeviceAllocator::BlockInfo& block) {
  if (block.allocated) return "active_allocated";
  return block.active ? "active_awaiting_free" : "inactive";
}

// As torch._C._cuda_memorySnapshot, of all cards, without stack traces and history.
py::dict memory_snapshot() {
  Locked guard(machine_lock);
  py::list segments;
  for (auto& card : cards)
    for (auto& segment : card.memory->snapshot()) {
      py::dict found;
      found["device"] = segment.device;
      found["address"] = segment.address;
      found["total_size"] = segment.total_size;
      found["allocated_size"] = segment.allocated_size;
      found["active_size"] = segment.active_size;
      found["requested_size"] = segment.requested_size;
      found["stream"] = reinterpret_cast<intptr_t>(segment.stream);
      found["segment_type"] = segment.is_large ? "large" : "small";
      found["segment_pool_id"] = py::make_tuple(0, 0);
      found["is_expandable"] = segment.is_expandable;
      found["frames"] = py::list();
      py::list blocks;
      auto address = segment.address;
      for (auto& block : segment.blocks) {
        py::dict one;
        one["address"] = address;
        one["size"] = block.size;
        one["requested_size"] = block.requested_size;
        one["state"] = state_of(block);
        one["frames"] = py::list();
        blocks.append(one);
        address += block.size;
      }
      found["blocks"] = blocks;
      segments.append(found);
    }
  py::dict found;
  found["segments"] = segments;
  found["device_traces"] = py::list();
  found["allocator_settings"] = py::dict();
  return found;
}

std::tuple<int64_t, int64_t, int64_t> stream_data(const c10::Stream& stream) {
  return {stream.id(), stream.device_index(), static_cast<int64_t>(stream.device_type())};
}

// A CPU tensor on the tensor's memory, for a collective on the current stream that the host does. The card may lag.
Tensor view_for_collective(const Tensor& tensor, bool is_write) {
  spend_launch();
  Locked guard(machine_lock);
  Queue* queue = current_queue(tensor.device().index());
  queue->drain(queue->num_issued);
  note_tensor_access(tensor, queue, launch(queue), is_write, "collective");
  return host_view(tensor);
}

// When the card reaches a collective that the host launches now.
int64_t reached_ns(DeviceIndex device) {
  Locked guard(machine_lock);
  return std::max(current_queue(device)->busy_until_ns, now_ns());
}

// A collective takes this long from when the last card has reached it. A card that reached it sooner is busy until then.
void count_collective(DeviceIndex device, int64_t own_ns, int64_t last_ns, int64_t for_ns) {
  Locked guard(machine_lock);
  busy(current_queue(device), own_ns, static_cast<double>(last_ns - own_ns + for_ns));
}

void resize_storage(c10::Storage storage, size_t size) {
  auto fresh = allocate_on(storage.device().index(), size);
  if (auto kept = std::min(size, storage.nbytes())) std::memcpy(fresh.get(), storage.data_ptr().get(), kept);
  storage.set_data_ptr(std::move(fresh));
  storage.set_nbytes(size);
}

void set_device(int to) {
  usable_card(static_cast<DeviceIndex>(to));
  current_device = static_cast<DeviceIndex>(to);
}

int exchange_device(int to) {
  return to < 0 ? -1 : Guard().exchangeDevice(Device(DeviceType::CUDA, static_cast<DeviceIndex>(to))).index();
}

std::map<std::string, int64_t> take_counts() {
  Locked guard(machine_lock);
  return {{"launches", counts.launches},
          {"synchronisations", counts.synchronisations},
          {"to_card", counts.to_card},
          {"to_host", counts.to_host}};
}

struct DdpTimer final : c10d::Timer {  // DistributedDataParallel wants one for each device type
  explicit DdpTimer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

}  // namespace
}  // namespace fake_cuda

namespace c10d {
namespace {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, fake_cuda::DdpTimer)
}  // namespace
}  // namespace c10d

PYBIND11_MODULE(fake_cuda_driver, m) {
  using namespace fake_cuda;
  using free_gil = py::call_guard<py::gil_scoped_release>;

  m.def(
      "set_up",
      [](std::vector<int> cards, int machine_cards, size_t total_bytes, size_t context_bytes, size_t others_bytes,
         double slowdown, double kernel_us, double launch_us, double copy_gbps, double pageable_gbps, double tflops,
         double tensor_tflops, double dram_gbps, int sms, bool computes, int capability_major,
         double throttle_after_s, double throttle_clock, bool throttles_by_heat, bool strict, std::vector<int64_t> lost_after,
         std::string state_path) {
        set_up({std::move(cards), machine_cards, total_bytes, context_bytes, others_bytes, slowdown, kernel_us,
                launch_us, copy_gbps, pageable_gbps, tflops, tensor_tflops, dram_gbps, sms, computes, capability_major,
                throttle_after_s, throttle_clock, throttles_by_heat, strict, std::move(lost_after),
                std::move(state_path)});
      },
      py::kw_only(), py::arg("cards"), py::arg("machine_cards"), py::arg("total_bytes"), py::arg("context_bytes"),
      py::arg("others_bytes"), py::arg("slowdown"), py::arg("kernel_us"), py::arg("launch_us"), py::arg("copy_gbps"),
      py::arg("pageable_gbps"), py::arg("tflops"), py::arg("tensor_tflops"), py::arg("dram_gbps"), py::arg("sms"),
      py::arg("computes"), py::arg("capability_major"), py::arg("throttle_after_s"), py::arg("throttle_clock"),
      py::arg("throttles_by_heat"), py::arg("strict"), py::arg("lost_after"), py::arg("state_path"));
  m.def("shut_down", &shut_down);

  // For tests.
  m.def("violations", &take_violations);
  m.def("counts", &take_counts);
  m.def("has_context", &has_context);
  m.def("busy_ns",
        [](int device, int64_t from_ns, int64_t to_ns) { return card(device).share->busy_ns(from_ns, to_ns); });
  m.def("uuid", [](int device) { return std::string(card(device).share->about().uuid); });

  // Devices.
  m.def("initialise", &initialise);
  m.def("is_forked", &is_forked);
  m.def("is_capturing", [] { return Guard().isStreamCapturing(Guard().getStream(Guard().getDevice())); });
  m.def("device", [] { return static_cast<int>(current_device); });
  m.def("set_device", &set_device);
  m.def("exchange_device", &exchange_device);
  m.def("synchronize", [] { synchronize_card(usable_card(current_device).index); }, free_gil());
  m.def("sync_debug", [] { return static_cast<int>(sync_debug.load()); });
  m.def("set_sync_debug", [](int mode) { sync_debug = static_cast<SyncDebug>(mode); });
  m.def("generator", [](int device) { return card(device).generator; });

  // Streams and events.
  m.def("current_stream", [](int device) { return stream_data(Guard().getStream(Device(DeviceType::CUDA, device))); });
  m.def("default_stream", [](int device) { return stream_data(stream_at(device, 0)); });
  m.def(
      "set_stream",
      [](int64_t stream_id, int64_t device_index, int64_t) {
        Guard().exchangeStream(stream_at(static_cast<DeviceIndex>(device_index), static_cast<int>(stream_id)));
        current_device = static_cast<DeviceIndex>(device_index);
      },
      py::arg("stream_id"), py::arg("device_index"), py::arg("device_type"));
  m.def("elapsed_ms", [](uintptr_t first, uintptr_t second) {
    return Guard().elapsedTime(reinterpret_cast<void*>(first), reinterpret_cast<void*>(second), -1);
  });

  // Memory.
  m.def("memory_info", [](int device) { return device_allocator()->getMemoryInfo(device); });
  m.def("memory_stats", &memory_stats);
  m.def("memory_snapshot", &memory_snapshot);
  m.def("reset_peak_stats", [](int device) { device_allocator()->resetPeakStats(device); });
  m.def("reset_accumulated_stats", [](int device) { device_allocator()->resetAccumulatedStats(device); });
  m.def("empty_cache", [] { device_allocator()->emptyCache(); }, free_gil());
  m.def("fraction", [](int device) { return card(device).memory->fraction(); });
  m.def("set_fraction", [](double fraction, int device) {
    Locked guard(machine_lock);
    usable_card(device).memory->set_fraction(fraction);
  });
  m.def("resize_storage", &resize_storage);

  // Collectives.
  m.def("view_for_collective", &view_for_collective, free_gil());
  m.def("reached_ns", &reached_ns);
  m.def("count_collective", &count_collective);
}
