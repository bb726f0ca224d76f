#include "device_memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace fake_cuda {
namespace {

constexpr size_t kFilledWhole = size_t(4) << 20, kFilledEnd = size_t(64) << 10;
constexpr size_t kStripe = 512, kStripeEvery = size_t(256) << 10;

// Segments of two streams and two pools each may reserve 9/8 of the card.
constexpr size_t kAddressSpaceOverMemory = 64;

}  // namespace

void fill_with_garbage(char* data, size_t size) {
  if (size <= kFilledWhole) {
    std::memset(data, kGarbage, size);
    return;
  }
  std::memset(data, kGarbage, kFilledEnd);
  std::memset(data + size - kFilledEnd, kGarbage, kFilledEnd);
  for (size_t at = kStripeEvery; at + kStripe <= size; at += kStripeEvery) std::memset(data + at, kGarbage, kStripe);
}

void DeviceMemory::make_space() {
  size_t size = kAddressSpaceOverMemory * std::max(total_bytes(), size_t(1) << 30);
  void* found = mmap(nullptr, size + kPageSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(found != MAP_FAILED, "no address space for a simulated card: ", std::strerror(errno));
  auto start = (reinterpret_cast<uintptr_t>(found) + kPageSize - 1) / kPageSize * kPageSize;
  auto data = reinterpret_cast<char*>(start);
  madvise(data, size, MADV_NOHUGEPAGE);  // a stripe of garbage is not to take 2 MiB
  free_addresses_.emplace(data, size);
}

char* DeviceMemory::reserve_addresses(size_t size) {
  if (free_addresses_.empty()) make_space();
  for (auto it = free_addresses_.begin(); it != free_addresses_.end(); ++it) {
    auto [data, space] = *it;
    if (space < size) continue;
    free_addresses_.erase(it);
    if (space > size) free_addresses_.emplace(data + size, space - size);
    return data;
  }
  TORCH_CHECK(false, "the simulated card has no address space left");
}

void DeviceMemory::release_addresses(char* data, size_t size) {
  auto after = free_addresses_.lower_bound(data);
  if (after != free_addresses_.end() && data + size == after->first) {
    size += after->second;
    after = free_addresses_.erase(after);
  }
  if (after != free_addresses_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == data) {
      before->second += size;
      return;
    }
  }
  free_addresses_.emplace(data, size);
}

bool DeviceMemory::map(char* data, size_t size) {
  if (!share_.take_bytes(size)) return false;
  if (mprotect(data, size, PROT_READ | PROT_WRITE) == 0) return true;
  share_.give_bytes(size);
  TORCH_CHECK(false, "the host has no memory for the simulated card: ", std::strerror(errno));
}

void DeviceMemory::unmap(char* data, size_t size) {
  madvise(data, size, MADV_DONTNEED);
  mprotect(data, size, PROT_NONE);
  share_.give_bytes(size);
}

char* DeviceMemory::allocate(size_t size) {
  char* data = reserve_addresses(size);
  if (map(data, size)) return data;
  release_addresses(data, size);
  return nullptr;
}

void DeviceMemory::release(char* data, size_t size) {
  unmap(data, size);
  release_addresses(data, size);
}

size_t DeviceMemory::free_bytes() const {
  auto used = share_.used_bytes();
  return used < total_bytes() ? total_bytes() - used : 0;
}

}  // namespace fake_cuda
