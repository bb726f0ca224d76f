// Memory of one card as torch hands it out: the rules of its caching allocator (c10/cuda/CUDACachingAllocator.cpp,
// written anew from what it does), so that what is reserved, split, kept and released is what a real card would see.
//
// Sizes are rounded to 512 bytes. Up to 1 MiB comes from a pool of 2 MiB segments, more from a pool whose segments are
// 20 MiB for requests below 10 MiB and the request rounded up to 2 MiB above. Within a pool and a stream the smallest
// free block that suffices is taken (the lowest of equals) and split if what remains is worth it; a freed block joins
// its free neighbours. Settings come from PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, read by torch's own parser.
// Not there: garbage_collection_threshold, private pools (CUDA graphs, MemPool), memory history.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <deque>
#include <optional>
#include <set>
#include <vector>

#include "device_memory.h"
#include "races.h"

namespace fake_cuda {

struct Card;
struct Pool;

struct ExpandableSegment {  // addresses for more than the whole card, of which pages are mapped as needed
  char* data;
  size_t size;
  size_t page_size;  // 2 MiB in the small pool, 20 MiB in the large one
};

struct Block {
  c10::DeviceIndex device;
  Queue* owner;  // the stream it is handed out on
  Pool* pool;
  char* data;
  size_t size;
  size_t requested = 0;
  bool is_allocated = false;
  bool is_mapped = true;    // false only in an expandable segment
  Block* before = nullptr;  // neighbours of the same segment
  Block* after = nullptr;
  ExpandableSegment* expandable = nullptr;
  std::vector<Queue*> recorded{};  // other streams that record_stream told of
  int num_events = 0;              // of these, that are not over
  uint64_t queued = 0;             // position in the owner's queue up to which copies of earlier tenants wait
  Uses uses{};

  bool is_split() const { return before != nullptr || after != nullptr; }
  bool is_usable() const { return !is_allocated && num_events == 0; }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const;
};
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const;
};

struct Pool {
  bool is_small;
  std::set<Block*, BySize> free;
  std::set<Block*, ByAddress> unmapped;
};

class CachingAllocator {
 public:
  explicit CachingAllocator(Card& card);

  Block* allocate(size_t size, Queue* owner);  // raises torch.OutOfMemoryError
  void free(Block* block);
  void record_stream(Block* block, Queue* queue);
  void empty_cache();

  void set_fraction(double fraction);
  double fraction() const { return fraction_.value_or(1.0); }
  std::pair<size_t, size_t> free_and_total() const { return {memory_.free_bytes(), memory_.total_bytes()}; }

  c10::CachingDeviceAllocator::DeviceStats stats() const { return stats_; }
  void reset_accumulated_stats();
  void reset_peak_stats();
  std::vector<c10::CachingDeviceAllocator::SegmentInfo> snapshot() const;

 private:
  Block* find_free(Pool& pool, Queue* owner, size_t size);
  Block* new_segment(Pool& pool, Queue* owner, size_t size, size_t segment_size);
  Block* hand_out(Block* block, size_t size, size_t requested);
  Block* split(Block* block, size_t size);  // the first part; the rest is free
  size_t join(Block* block, Block* neighbour);
  void make_free(Block* block);

  bool release_oversize(Pool& pool, Queue* owner, size_t size);
  void release_cached();
  void release_segment(Block* block);

  Block* grow_expandable(Pool& pool, Queue* owner, size_t size);
  Block* find_expandable(Pool& pool, Queue* owner, size_t size);
  bool map(Block* block, size_t size);
  void unmap(Block* block);

  void record_events(Block* block);
  void finish_events(bool waits);
  [[noreturn]] void raise_out_of_memory(size_t segment_size);

  template <typename Change>
  void count(const Pool& pool, Change change) {  // for "all" and for the pool
    using c10::CachingAllocator::StatType;
    change(static_cast<size_t>(StatType::AGGREGATE));
    change(static_cast<size_t>(pool.is_small ? StatType::SMALL_POOL : StatType::LARGE_POOL));
  }

  Card& card_;
  DeviceMemory memory_;
  Pool small_{true, {}, {}}, large_{false, {}, {}};
  std::set<Block*> active_;
  std::map<Queue*, std::deque<std::pair<Event, Block*>>> events_;
  std::vector<std::unique_ptr<ExpandableSegment>> expandable_;
  std::optional<double> fraction_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

// torch's allocators of CUDA memory and of pinned memory, on top of it.
void install_allocators();
c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t size);
Block* block_of(const c10::DataPtr& data);  // nullptr: not the simulated card's

}  // namespace fake_cuda
