// Memory of one card: address space, and host memory behind the parts of it that are mapped.
#pragma once

#include <cstddef>
#include <map>

#include "shared_state.h"

namespace fake_cuda {

inline size_t rounded_up(size_t size, size_t to) { return (size + to - 1) / to * to; }

// What a fresh or reused block holds: NaN, or -1. Who reads before something is written sees it.
constexpr int kGarbage = 0xFF;

// Fills small blocks, and of large ones both ends and a bit every so often, so that memory that nobody writes to takes
// nothing of the host's: a card may be as large as the host's memory.
void fill_with_garbage(char* data, size_t size);

class DeviceMemory {
 public:
  static constexpr size_t kPageSize = size_t(2) << 20;

  explicit DeviceMemory(CardShare& share) : share_(share) {}

  // nullptr: the card has not so much. Sizes are multiples of kPageSize.
  char* allocate(size_t size);
  void release(char* data, size_t size);

  // The same in two steps, for segments that grow. Touching what is not mapped ends the process.
  char* reserve_addresses(size_t size);
  void release_addresses(char* data, size_t size);
  bool map(char* data, size_t size);
  void unmap(char* data, size_t size);

  size_t total_bytes() const { return share_.about().total_bytes; }
  size_t free_bytes() const;

 private:
  void make_space();

  CardShare& share_;
  std::map<char*, size_t> free_addresses_;  // first fit from below, as the driver's seem to be: runs are alike
};

}  // namespace fake_cuda
