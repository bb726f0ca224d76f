// Segments that grow: CachingAllocator with expandable_segments:True. Addresses for more than the whole card are set
// apart once for a pool and a stream; pages of 2 MiB (small pool) or 20 MiB are mapped at the lowest place that fits.
#include <c10/core/AllocatorConfig.h>

#include <algorithm>

#include "caching_allocator.h"
#include "machine.h"

namespace fake_cuda {

// The lowest place with room for so much in what is free or not mapped yet.
Block* CachingAllocator::find_expandable(Pool& pool, Queue* owner, size_t size) {
  for (Block* candidate : pool.unmapped) {
    if (candidate->owner != owner) continue;
    Block* first = candidate->before && candidate->before->is_usable() ? candidate->before : candidate;
    size_t room = 0;
    for (Block* block = first; block && block->is_usable() && room < size; block = block->after) room += block->size;
    if (room >= size) return first;
  }
  size_t page_size = pool.is_small ? c10::CachingAllocator::kSmallBuffer
                                   : c10::CachingAllocator::AcceleratorAllocatorConfig::large_segment_size();
  size_t space = rounded_up(memory_.total_bytes() + memory_.total_bytes() / 8, page_size);
  char* data = memory_.reserve_addresses(space);
  expandable_.push_back(std::make_unique<ExpandableSegment>(ExpandableSegment{data, space, page_size}));
  auto block = new Block{card_.index, owner, &pool, data, space};
  block->is_mapped = false;
  block->expandable = expandable_.back().get();
  pool.unmapped.insert(block);
  return block;
}

Block* CachingAllocator::grow_expandable(Pool& pool, Queue* owner, size_t size) {
  Block* block = find_expandable(pool, owner, size);
  if (!block->is_mapped && !map(block, std::min(block->size, size))) return nullptr;
  while (block->size < size) {
    Block* next = block->after;
    if (!map(next, std::min(size - block->size, next->size))) return nullptr;
    block = next;  // which has taken its free neighbour in
  }
  pool.free.erase(block);
  return block;
}

// Maps whole pages from the block's start on and makes them free.
bool CachingAllocator::map(Block* block, size_t size) {
  size_t mapped = rounded_up(size, block->expandable->page_size);
  if (!memory_.map(block->data, mapped)) return false;
  Pool& pool = *block->pool;
  pool.unmapped.erase(block);
  block->is_mapped = true;
  if (mapped < block->size) {
    auto rest = new Block{block->device, block->owner, &pool, block->data + mapped, block->size - mapped};
    rest->is_mapped = false;
    rest->expandable = block->expandable;
    rest->before = block;
    rest->after = block->after;
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->size = mapped;
    pool.unmapped.insert(rest);
  }
  join(block, block->before);
  join(block, block->after);
  pool.free.insert(block);
  count(pool, [&](size_t i) { stats_.reserved_bytes[i].increase(mapped); });
  ++stats_.num_device_alloc;
  return true;
}

// Gives the whole pages of a free block back, and the segment if nothing of it is in use.
void CachingAllocator::unmap(Block* block) {
  ExpandableSegment* segment = block->expandable;
  size_t offset = static_cast<size_t>(block->data - segment->data);
  size_t begin = rounded_up(offset, segment->page_size);
  size_t end = (offset + block->size) / segment->page_size * segment->page_size;
  if (begin >= end) return;
  Pool& pool = *block->pool;
  pool.free.erase(block);
  auto keep = [&](char* data, size_t size, Block* before, Block* after) {
    auto kept = new Block{block->device, block->owner, &pool, data, size};
    kept->expandable = segment;
    kept->queued = block->queued;
    kept->before = before;
    kept->after = after;
    if (before) before->after = kept;
    if (after) after->before = kept;
    pool.free.insert(kept);
  };
  if (begin > offset) keep(block->data, begin - offset, block->before, block);
  if (end < offset + block->size) keep(segment->data + end, offset + block->size - end, block, block->after);
  block->data = segment->data + begin;
  block->size = end - begin;
  block->is_mapped = false;
  memory_.unmap(block->data, end - begin);
  join(block, block->before);
  join(block, block->after);
  pool.unmapped.insert(block);
  count(pool, [&](size_t i) { stats_.reserved_bytes[i].decrease(end - begin); });
  ++stats_.num_device_free;
  if (block->is_split()) return;
  pool.unmapped.erase(block);
  memory_.release_addresses(segment->data, segment->size);
  std::erase_if(expandable_, [&](auto& it) { return it.get() == segment; });
  delete block;
}

}  // namespace fake_cuda
