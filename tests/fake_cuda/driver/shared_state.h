// What this process does on its cards, written where other processes and the simulated NVML read it (machine_state.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../machine_state.h"

namespace fake_cuda {

// The machine's memory-mapped state; without a file, memory of this process alone.
class SharedState {
 public:
  SharedState(const std::string& path, int num_cards, size_t total_bytes, size_t context_bytes, size_t others_bytes);
  fake_cuda_machine* machine() { return machine_; }
  fake_cuda_process* place();  // this process's, taken when it first uses a card
  void give_back();
  void lock();  // among processes
  void unlock();

 private:
  fake_cuda_machine* machine_ = nullptr;
  fake_cuda_process* place_ = nullptr;
  int file_ = -1;
};

// This process's part of one card.
class CardShare {
 public:
  CardShare(SharedState& state, int machine_index);
  const fake_cuda_card& about() const { return state_.machine()->cards[index_]; }
  int machine_index() const { return index_; }

  void use();  // makes the context
  bool has_context() const { return share_ != nullptr; }

  bool take_bytes(size_t size);  // false: the card has not so much
  void give_bytes(size_t size);
  size_t used_bytes();                                 // by all processes
  std::vector<std::pair<uint64_t, uint64_t>> users();  // (process, bytes) of those that live

  bool is_lost() const;
  void lose();

  // What the card is like: whether kernels say how much of it they use, and from which busy time on it throttles.
  void describe(bool has_roofline, int64_t throttle_after_ns, double throttle_clock, bool throttles_by_heat);
  double clock_at(int64_t at_ns);  // share of its clock; throttling begins when it is due

  void busy(int64_t from_ns, int64_t to_ns);
  void use_parts(int64_t from_ns, int64_t to_ns, const std::array<double, FAKE_CUDA_NUM_PARTS>& shares);
  void count_launch();
  void count_copy(size_t to_card_bytes, size_t to_host_bytes);
  int64_t busy_ns(int64_t from_ns, int64_t to_ns);  // of all processes

 private:
  void add_slices(int64_t from_ns, int64_t to_ns);

  SharedState& state_;
  int index_;
  fake_cuda_share* share_ = nullptr;
  bool has_roofline_ = false;
  int64_t throttle_after_ns_ = -1;
  double throttle_clock_ = 1;
  bool throttles_by_heat_ = false;
  std::map<int64_t, int64_t> recent_;  // begin -> end of what is busy already, so that no time counts twice
};

}  // namespace fake_cuda
