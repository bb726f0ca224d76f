#include "caching_allocator.h"

#include <c10/core/AllocatorConfig.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "machine.h"

namespace fake_cuda {
namespace {

using c10::CachingAllocator::kMinBlockSize;
using c10::CachingAllocator::kMinLargeAlloc;
using c10::CachingAllocator::kRoundLarge;
using c10::CachingAllocator::kSmallBuffer;
using c10::CachingAllocator::kSmallSize;
using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;

size_t rounded(size_t size) {
  if (size < kMinBlockSize) return kMinBlockSize;
  size_t divisions = Config::roundup_power2_divisions(size);
  if (divisions <= 1 || size <= kMinBlockSize * divisions) return rounded_up(size, kMinBlockSize);
  size_t power = size_t(1) << (63 - __builtin_clzll(size));
  size_t step = power / divisions;
  return step == 0 ? 2 * power : rounded_up(size, step);
}

size_t segment_size_for(size_t size) {
  if (size <= kSmallSize) return kSmallBuffer;
  return size < kMinLargeAlloc ? Config::large_segment_size() : rounded_up(size, kRoundLarge);
}

bool is_worth_splitting(const Block* block, size_t size) {
  size_t rest = block->size - size;
  if (block->pool->is_small || Config::use_expandable_segments()) return rest >= kMinBlockSize;
  return size < Config::max_split_size() && rest > kSmallSize;
}

// Best fit counts what a block at the end of an expandable segment can grow to.
size_t size_when_grown(const Block* block) {
  return block->size + (block->after && !block->after->is_mapped ? block->after->size : 0);
}

}  // namespace

bool BySize::operator()(const Block* a, const Block* b) const {
  return std::tuple(a->owner->number, a->size, a->data) < std::tuple(b->owner->number, b->size, b->data);
}
bool ByAddress::operator()(const Block* a, const Block* b) const {
  return std::tuple(a->owner->number, a->data) < std::tuple(b->owner->number, b->data);
}

CachingAllocator::CachingAllocator(Card& card) : card_(card), memory_(*card.share) {
  stats_.max_split_size = static_cast<int64_t>(Config::max_split_size());
}

// -- handing out and taking back ------------------------------------------------------------------------------------

Block* CachingAllocator::allocate(size_t requested, Queue* owner) {
  finish_events(false);
  size_t size = rounded(requested), segment_size = segment_size_for(size);
  Pool& pool = size <= kSmallSize ? small_ : large_;
  Block* block = find_free(pool, owner, size);
  if (!block) block = new_segment(pool, owner, size, segment_size);
  if (!block && release_oversize(pool, owner, size)) block = new_segment(pool, owner, size, segment_size);
  if (!block) {
    release_cached();
    ++stats_.num_alloc_retries;
    block = new_segment(pool, owner, size, segment_size);
  }
  if (!block) raise_out_of_memory(segment_size);
  return hand_out(block, size, requested);
}

Block* CachingAllocator::find_free(Pool& pool, Queue* owner, size_t size) {
  Block wanted{card_.index, owner, &pool, nullptr, size};
  auto is_of_stream = [&](auto it) { return it != pool.free.end() && (*it)->owner == owner; };
  auto it = pool.free.lower_bound(&wanted);
  if (!is_of_stream(it)) return nullptr;
  if ((*it)->expandable && Config::use_expandable_segments()) {
    for (auto next = std::next(it); (*it)->expandable && is_of_stream(next); ++next) {
      if (size_when_grown(*next) >= size_when_grown(*it)) break;
      it = next;
    }
  } else {  // the setting may have been turned off meanwhile
    while (is_of_stream(it) && (*it)->expandable) ++it;
    if (!is_of_stream(it)) return nullptr;
  }
  Block* block = *it;
  bool is_oversize = block->size >= Config::max_split_size();
  if (size < Config::max_split_size() ? is_oversize : block->size >= size + Config::max_non_split_rounding_size())
    return nullptr;
  pool.free.erase(it);
  return block;
}

Block* CachingAllocator::hand_out(Block* block, size_t size, size_t requested) {
  Pool& pool = *block->pool;
  bool was_split = block->is_split();
  if (is_worth_splitting(block, size)) {
    size_t rest = block->size - size;
    block = split(block, size);
    if (!block->expandable)
      count(pool, [&](size_t i) {
        if (was_split) {
          stats_.inactive_split_bytes[i].decrease(size);
        } else {
          stats_.inactive_split_bytes[i].increase(rest);
          stats_.inactive_split[i].increase(1);
        }
      });
  } else if (was_split && !block->expandable) {
    count(pool, [&](size_t i) {
      stats_.inactive_split_bytes[i].decrease(block->size);
      stats_.inactive_split[i].decrease(1);
    });
  }
  block->is_allocated = true;
  block->requested = requested;
  block->uses = {};
  block->recorded.clear();
  active_.insert(block);
  count(pool, [&](size_t i) {
    stats_.allocation[i].increase(1);
    stats_.allocated_bytes[i].increase(block->size);
    stats_.active[i].increase(1);
    stats_.active_bytes[i].increase(block->size);
    stats_.requested_bytes[i].increase(block->requested);
  });
  if (block->size >= Config::max_split_size()) stats_.oversize_allocations.increase(1);
  // A copy of the last tenant that is still to be made comes first, as the stream's order says.
  auto fill = [data = block->data, size = block->size] {
    if (settings.computes) fill_with_garbage(data, size);
  };
  if (block->queued > block->owner->num_done) {
    block->owner->push(fill);
    block->queued = block->owner->num_issued;
  } else {
    fill();
  }
  return block;
}

void CachingAllocator::free(Block* block) {
  note_free(block->uses, block->owner, block->recorded);
  block->is_allocated = false;
  count(*block->pool, [&](size_t i) {
    stats_.allocation[i].decrease(1);
    stats_.allocated_bytes[i].decrease(block->size);
  });
  if (block->size >= Config::max_split_size()) stats_.oversize_allocations.decrease(1);
  if (block->recorded.empty()) {
    make_free(block);
  } else {
    record_events(block);
  }
}

void CachingAllocator::make_free(Block* block) {
  Pool& pool = *block->pool;
  size_t size = block->size;
  int64_t num_split = 0, split_bytes = 0;
  for (Block* neighbour : {block->before, block->after}) {
    size_t joined = join(block, neighbour);
    if (joined == 0) continue;
    num_split -= 1;
    split_bytes -= static_cast<int64_t>(joined);
  }
  active_.erase(block);
  pool.free.insert(block);
  if (block->is_split()) {
    num_split += 1;
    split_bytes += static_cast<int64_t>(block->size);
  }
  auto change = [](c10::CachingAllocator::Stat& stat, int64_t by) {
    if (by > 0) stat.increase(static_cast<size_t>(by));
    if (by < 0) stat.decrease(static_cast<size_t>(-by));
  };
  count(pool, [&](size_t i) {
    if (!block->expandable) {
      change(stats_.inactive_split[i], num_split);
      change(stats_.inactive_split_bytes[i], split_bytes);
    }
    stats_.active[i].decrease(1);
    stats_.active_bytes[i].decrease(size);
    stats_.requested_bytes[i].decrease(block->requested);
  });
}

Block* CachingAllocator::split(Block* block, size_t size) {
  auto first = new Block{block->device, block->owner, block->pool, block->data, size};
  first->expandable = block->expandable;
  first->queued = block->queued;
  first->before = block->before;
  if (first->before) first->before->after = first;
  first->after = block;
  block->before = first;
  block->data += size;
  block->size -= size;
  block->pool->free.insert(block);
  return first;
}

// Makes a free neighbour part of the block; its size, or 0 if it can't be joined.
size_t CachingAllocator::join(Block* block, Block* neighbour) {
  if (!neighbour || !neighbour->is_usable() || neighbour->is_mapped != block->is_mapped) return 0;
  if (neighbour->is_mapped) {
    block->pool->free.erase(neighbour);
  } else {
    block->pool->unmapped.erase(neighbour);
  }
  if (block->before == neighbour) {
    block->data = neighbour->data;
    block->before = neighbour->before;
    if (block->before) block->before->after = block;
  } else {
    block->after = neighbour->after;
    if (block->after) block->after->before = block;
  }
  size_t size = neighbour->size;
  block->size += size;
  block->queued = std::max(block->queued, neighbour->queued);
  delete neighbour;
  return size;
}

// -- segments ---------------------------------------------------------------------------------------------------------

Block* CachingAllocator::new_segment(Pool& pool, Queue* owner, size_t size, size_t segment_size) {
  check_not_lost(card_);
  size_t allowed = static_cast<size_t>(fraction() * static_cast<double>(memory_.total_bytes()));
  auto reserved = static_cast<size_t>(stats_.reserved_bytes[0].current);
  if (fraction_ && reserved + segment_size > allowed) return nullptr;
  if (Config::use_expandable_segments()) return grow_expandable(pool, owner, size);
  char* data = memory_.allocate(segment_size);
  if (!data) return nullptr;
  count(pool, [&](size_t i) {
    stats_.segment[i].increase(1);
    stats_.reserved_bytes[i].increase(segment_size);
  });
  if (segment_size >= Config::max_split_size()) stats_.oversize_segments.increase(1);
  ++stats_.num_device_alloc;
  return new Block{card_.index, owner, &pool, data, segment_size};
}

void CachingAllocator::release_segment(Block* block) {
  ++stats_.num_device_free;
  memory_.release(block->data, block->size);
  count(*block->pool, [&](size_t i) {
    stats_.segment[i].decrease(1);
    stats_.reserved_bytes[i].decrease(block->size);
  });
  if (block->size >= Config::max_split_size()) stats_.oversize_segments.decrease(1);
  block->pool->free.erase(block);
  delete block;
}

// With max_split_size_mb: enough of the blocks that are never split, the largest of them if none is large enough alone.
bool CachingAllocator::release_oversize(Pool& pool, Queue* owner, size_t size) {
  if (Config::max_split_size() == std::numeric_limits<size_t>::max()) return false;
  size_t needed = std::max(size, Config::max_split_size());
  Block wanted{card_.index, owner, &pool, nullptr, needed};
  auto it = pool.free.lower_bound(&wanted);
  std::vector<Block*> chosen;
  size_t released = 0;
  if (it != pool.free.end() && (*it)->owner == owner) {
    chosen.push_back(*it);
    released = needed;
  }
  while (released < needed && it != pool.free.begin()) {
    --it;
    if ((*it)->owner != owner || (*it)->size < Config::max_split_size()) break;
    chosen.push_back(*it);
    released += (*it)->size;
  }
  if (!chosen.empty()) synchronize_card(card_.index);  // cudaFree waits for the card
  for (Block* block : chosen) release_segment(block);
  return released >= needed;
}

void CachingAllocator::release_cached() {
  if (stats_.reserved_bytes[0].current == 0) return;
  synchronize_card(card_.index);  // as cudaFree does; copies that wait are made before their memory goes
  finish_events(true);
  for (Pool* pool : {&large_, &small_}) {
    std::vector<Block*> whole, expandable;
    for (Block* block : pool->free) {
      if (block->expandable) {
        expandable.push_back(block);
      } else if (!block->is_split()) {
        whole.push_back(block);
      }
    }
    for (Block* block : whole) release_segment(block);
    for (Block* block : expandable) unmap(block);
  }
}

// -- blocks that other streams use ------------------------------------------------------------------------------------

void CachingAllocator::record_stream(Block* block, Queue* queue) {
  auto& recorded = block->recorded;
  if (queue != block->owner && std::find(recorded.begin(), recorded.end(), queue) == recorded.end())
    recorded.push_back(queue);
}

void CachingAllocator::record_events(Block* block) {
  for (Queue* queue : std::exchange(block->recorded, {})) {
    ++block->num_events;
    events_[queue].emplace_back(record_event(queue), block);
  }
}

// Blocks whose events are over are free; with waits the host has waited for all of them.
void CachingAllocator::finish_events(bool waits) {
  if (waits) ++stats_.num_sync_all_streams;
  for (auto& [queue, waiting] : events_)
    while (!waiting.empty() && is_over(waiting.front().first)) {
      Block* block = waiting.front().second;
      waiting.pop_front();
      if (--block->num_events == 0) make_free(block);
    }
}

void CachingAllocator::empty_cache() { release_cached(); }

void CachingAllocator::set_fraction(double fraction) { fraction_ = fraction; }

}  // namespace fake_cuda
