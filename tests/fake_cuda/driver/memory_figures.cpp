// What CachingAllocator tells: statistics, the segments with their blocks, and that memory is out, in torch's words.
#include <unistd.h>

#include "caching_allocator.h"
#include "machine.h"

namespace fake_cuda {
namespace {

std::array<c10::CachingAllocator::StatArray*, 9> stat_arrays(c10::CachingDeviceAllocator::DeviceStats& stats) {
  return {&stats.allocation,      &stats.segment,        &stats.active,       &stats.inactive_split,
          &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes,
          &stats.requested_bytes};
}

}  // namespace

void CachingAllocator::raise_out_of_memory(size_t segment_size) {
  using c10::CachingAllocator::format_size;
  ++stats_.num_ooms;
  auto allocated = static_cast<size_t>(stats_.allocated_bytes[0].current);
  auto reserved = static_cast<size_t>(stats_.reserved_bytes[0].current);
  std::string processes;
  for (auto& [pid, bytes] : card_.share->users()) {
    bool is_this = pid == static_cast<uint64_t>(getpid());
    processes += is_this ? "Including non-PyTorch memory, this process" : "Process " + std::to_string(pid);
    processes += " has " + format_size(bytes) + " memory in use. ";
  }
  std::string allowed;
  if (fraction_) allowed = format_size(static_cast<uint64_t>(*fraction_ * memory_.total_bytes())) + " allowed; ";
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", format_size(segment_size), ". GPU ",
      static_cast<int>(card_.index), " has a total capacity of ", format_size(memory_.total_bytes()), " of which ",
      format_size(memory_.free_bytes()), " is free. ", processes, allowed, "Of the allocated memory ",
      format_size(allocated), " is allocated by PyTorch, and ", format_size(reserved - allocated),
      " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
      "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
      "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf)");
}

void CachingAllocator::reset_accumulated_stats() {
  for (auto* array : stat_arrays(stats_))
    for (auto& stat : *array) stat.reset_accumulated();
  stats_.oversize_allocations.reset_accumulated();
  stats_.oversize_segments.reset_accumulated();
  stats_.num_alloc_retries = stats_.num_ooms = stats_.num_sync_all_streams = 0;
  stats_.num_device_alloc = stats_.num_device_free = 0;
}

void CachingAllocator::reset_peak_stats() {
  for (auto* array : stat_arrays(stats_))
    for (auto& stat : *array) stat.reset_peak();
  stats_.oversize_allocations.reset_peak();
  stats_.oversize_segments.reset_peak();
}

std::vector<c10::CachingDeviceAllocator::SegmentInfo> CachingAllocator::snapshot() const {
  std::set<const Block*, ByAddress> firsts;
  auto add = [&](const Block* block) {
    bool is_first = block->is_mapped && (!block->before || !block->before->is_mapped);
    if (is_first) firsts.insert(block);
  };
  for (auto* pool : {&small_, &large_})
    for (auto* block : pool->free) add(block);
  for (auto* block : active_) add(block);
  std::vector<c10::CachingDeviceAllocator::SegmentInfo> found;
  for (const Block* first : firsts) {
    auto& segment = found.emplace_back();
    segment.device = first->device;
    segment.address = reinterpret_cast<size_t>(first->data);
    segment.stream = reinterpret_cast<void*>(static_cast<intptr_t>(first->owner->number));
    segment.is_large = !first->pool->is_small;
    segment.is_expandable = first->expandable != nullptr;
    for (const Block* block = first; block && block->is_mapped; block = block->after) {
      bool is_active = block->is_allocated || block->num_events > 0;
      segment.blocks.push_back({block->size, block->requested, 0, block->is_allocated, is_active, nullptr});
      segment.total_size += block->size;
      if (block->is_allocated) segment.allocated_size += block->size;
      if (is_active) segment.active_size += block->size;
      if (is_active) segment.requested_size += block->requested;
    }
  }
  return found;
}

}  // namespace fake_cuda
