// Time of the host, and vector clocks: what a stream or the host knows to be over.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <thread>

namespace fake_cuda {

// Stream's number -> how many of its launches are known to be over.
using Clocks = std::map<int, uint64_t>;

inline int64_t now_ns() {  // CLOCK_MONOTONIC, as machine_state.h has it
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

inline void sleep_until(int64_t at_ns) {
  auto left = at_ns - now_ns();
  if (left > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(left));
}

inline void work_until(int64_t at_ns) {  // keeps the thread busy
  while (now_ns() < at_ns) {
  }
}

inline void merge(Clocks& into, const Clocks& from) {
  for (auto& [stream, tick] : from) into[stream] = std::max(into[stream], tick);
}

inline bool covers(const Clocks& known, int stream, uint64_t tick) {
  auto found = known.find(stream);
  return found != known.end() && found->second >= tick;
}

}  // namespace fake_cuda
