// The simulated machine as one process sees it: its cards, what they are like, and the errors of CUDA's runtime.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shared_state.h"
#include "streams.h"

namespace fake_cuda {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

class CachingAllocator;

struct Settings {
  std::vector<int> cards;  // of the machine, that this process sees; by its own numbers for them
  int machine_cards = 0;
  size_t total_bytes = size_t(1) << 30;
  size_t context_bytes = 0;
  size_t others_bytes = 0;
  double slowdown = 1;
  double kernel_us = 0;
  double launch_us = 0;      // of the host, for each launch
  double copy_gbps = 0;      // from and to pinned memory; 0 = no time
  double pageable_gbps = 0;  // from and to other memory; 0 = the same
  double tflops = 0;         // of float32; 0 = no roofline: a kernel takes the host's time
  double tensor_tflops = 0;  // of 16-bit types on tensor cores; TF32 has half; 0 = there are none
  double dram_gbps = 0;      // 0 = memory takes no time
  int sms = 32;
  bool computes = true;  // false: kernels leave memory as it is and take their time of the roofline
  int capability_major = 9;
  double throttle_after_s = -1;  // of busy time; -1 = never
  double throttle_clock = 1;     // share of its clock that a throttled card keeps
  bool throttles_by_heat = false;
  bool strict = false;
  std::vector<int64_t> lost_after;  // launches, by the machine's numbers for the cards; -1 = never
  std::string state_path;
};

struct Card {
  DeviceIndex index = 0;
  std::unique_ptr<CardShare> share;
  std::vector<std::unique_ptr<Queue>> queues;  // [0] is the default stream's
  int newest_pool_queue = 0;
  std::unique_ptr<CachingAllocator> memory;
  at::Generator generator;
  int64_t num_launches = 0;
  int64_t lost_after = -1;
};

struct Counts {
  int64_t launches = 0, synchronisations = 0, to_card = 0, to_host = 0;
};

// One lock for everything here. Held for short moments: never while a kernel runs or the host waits for a card.
extern std::recursive_mutex machine_lock;

// Holds the lock. A thread that must wait for it gives Python's lock away meanwhile: who holds this one may want that,
// since a tensor known to Python takes it when its count of references changes.
class Locked {
 public:
  explicit Locked(std::recursive_mutex& lock);
  ~Locked() { lock_.unlock(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  std::recursive_mutex& lock_;
};

extern Settings settings;
extern std::vector<Card> cards;
extern Counts counts;
extern thread_local DeviceIndex current_device;

void set_up(Settings given);
void shut_down();  // gives the process's place in the shared state back
void initialise();   // as torch does before its first use of a card
bool is_forked();  // a child of a process that had used its cards, which can't use them

Card& card(DeviceIndex index);         // "invalid device ordinal" beyond the last
Card& usable_card(DeviceIndex index);  // as a call of the runtime finds it: makes the context; raises if it is lost
void check_not_lost(const Card& card);
bool has_context(DeviceIndex index);

// An error of CUDA's runtime as torch raises it: torch.AcceleratorError with that code.
[[noreturn]] void raise_cuda_error(int code, const std::string& name, const std::string& text);

Queue* current_queue(DeviceIndex device);
int& current_stream_id(DeviceIndex device);  // of this thread
Queue* new_queue(Card& card);

}  // namespace fake_cuda
