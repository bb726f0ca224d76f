// Finds accesses to the card's memory that no event, wait or synchronisation orders: a vector clock a stream.
#pragma once

#include <string>
#include <vector>

#include "streams.h"

namespace fake_cuda {

struct Uses {  // of one block of memory, since it was handed out
  int writer = -1;
  uint64_t written = 0;  // the writer's launch
  Clocks reads;
};

// A launch on that stream uses the memory. With FAKE_CUDA_STRICT a violation raises at once.
void note_access(Uses& uses, Queue* queue, uint64_t tick, bool is_write, const std::string& by);

// The memory is given back by its owner. recorded: streams that record_stream told of it.
void note_free(const Uses& uses, Queue* owner, const std::vector<Queue*>& recorded);

std::vector<std::string> take_violations();  // and forget them

}  // namespace fake_cuda
