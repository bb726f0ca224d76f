// Streams and events. Device time is modelled: a queue knows until when it is busy. Copies from and to pinned memory
// are really done late: when something that the order puts after them runs, or the host waits.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <deque>
#include <functional>

#include "clocks.h"

namespace fake_cuda {

struct Use {  // of the whole card, while a kernel runs: shares from 0 to 1
  double multiprocessors = 1, tensor_cores = 0, memory = 0;
};

struct Queue {  // of one stream
  int number;   // over all cards
  c10::DeviceIndex device;
  std::deque<std::function<void()>> pending{};
  uint64_t num_issued = 0, num_done = 0;
  int64_t busy_until_ns = 0;
  Clocks known{};  // [number] counts its own launches

  void push(std::function<void()> work);
  void drain(uint64_t up_to);  // do what is pending, in order
};

struct Event {
  Queue* queue = nullptr;
  uint64_t position = 0;  // in what the queue was issued
  int64_t at_ns = 0;      // when the card reaches it
  bool is_timed = false;
  Clocks known{};
};

extern Clocks host_known;  // of the process: threads that order themselves by other means are not told apart

c10::Stream stream_at(c10::DeviceIndex device, int id);
Queue* queue_of(const c10::Stream& stream);

void spend_launch();            // the host's time for one, before it; not under the lock
uint64_t launch(Queue* queue);  // counts one; its number on that stream. Raises if the card is lost.
void busy(Queue* queue, int64_t began_ns, double for_ns, Use use = {});
void compute(Queue* queue, int64_t began_ns, double for_ns, Use use = {});  // at the clock that throttling leaves

Event record_event(Queue* queue, bool is_timed = false);
void wait_for(Queue* queue, const Event& event);  // on the card
bool is_over(const Event& event);                 // the host asks; if so, it knows what the event knew
void synchronize(const Event& event);             // the host waits
void synchronize(Queue* queue);
void synchronize_card(c10::DeviceIndex device);

// torch.cuda.set_sync_debug_mode. Who waits for the card where a CUDA build of torch would tell calls tell_of_wait
// first, without the lock: before what it waits for, as there, so that an error leaves nothing done.
enum class SyncDebug { kOff, kWarn, kRaise };
extern std::atomic<SyncDebug> sync_debug;
void tell_of_wait();

}  // namespace fake_cuda
