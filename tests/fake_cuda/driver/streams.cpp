#include "streams.h"

#include <c10/util/Exception.h>

#include "machine.h"

namespace fake_cuda {

Clocks host_known;
std::atomic<SyncDebug> sync_debug = SyncDebug::kOff;

void Queue::push(std::function<void()> work) {
  pending.push_back(std::move(work));
  ++num_issued;
}

void Queue::drain(uint64_t up_to) {
  while (num_done < up_to && !pending.empty()) {
    auto work = std::move(pending.front());
    pending.pop_front();
    ++num_done;
    work();
  }
}

c10::Stream stream_at(DeviceIndex device, int id) {
  return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, device), id);
}

Queue* queue_of(const c10::Stream& stream) {
  return card(stream.device_index()).queues.at(static_cast<size_t>(stream.id())).get();
}

void spend_launch() {
  if (settings.launch_us > 0) work_until(now_ns() + static_cast<int64_t>(1e3 * settings.launch_us));
}

uint64_t launch(Queue* queue) {
  Card& it = cards[queue->device];
  if (it.lost_after >= 0 && it.num_launches >= it.lost_after) it.share->lose();
  check_not_lost(it);
  ++it.num_launches;
  ++counts.launches;
  it.share->count_launch();
  merge(queue->known, host_known);
  return ++queue->known[queue->number];
}

void busy(Queue* queue, int64_t began_ns, double for_ns, Use use) {
  auto from = std::max(queue->busy_until_ns, began_ns);
  queue->busy_until_ns = from + static_cast<int64_t>(for_ns);
  cards[queue->device].share->busy(from, queue->busy_until_ns);
  cards[queue->device].share->use_parts(from, queue->busy_until_ns,
                                        {use.multiprocessors, use.tensor_cores, use.memory});
}

void compute(Queue* queue, int64_t began_ns, double for_ns, Use use) {
  double clock = cards[queue->device].share->clock_at(std::max(queue->busy_until_ns, began_ns));
  use.memory *= clock;
  busy(queue, began_ns, for_ns / clock, use);
}

Event record_event(Queue* queue, bool is_timed) {
  return {queue, queue->num_issued, std::max(now_ns(), queue->busy_until_ns), is_timed, queue->known};
}

void wait_for(Queue* queue, const Event& event) {
  if (event.queue != queue) queue->push([from = event.queue, position = event.position] { from->drain(position); });
  queue->busy_until_ns = std::max(queue->busy_until_ns, event.at_ns);
  merge(queue->known, event.known);
}

bool is_over(const Event& event) {
  if (event.at_ns > now_ns()) return false;
  event.queue->drain(event.position);
  merge(host_known, event.known);
  return true;
}

void synchronize(const Event& event) {
  {
    Locked guard(machine_lock);
    check_not_lost(cards[event.queue->device]);
    ++counts.synchronisations;
    event.queue->drain(event.position);
  }
  sleep_until(event.at_ns);  // other threads go on launching meanwhile
  Locked guard(machine_lock);
  merge(host_known, event.known);
}

void synchronize(Queue* queue) {
  Event last;
  {
    Locked guard(machine_lock);
    last = record_event(queue);
  }
  synchronize(last);
}

void synchronize_card(DeviceIndex device) {
  for (size_t i = 0; i < card(device).queues.size(); ++i) synchronize(card(device).queues[i].get());
}

void tell_of_wait() {
  constexpr auto kText = "called a synchronizing CUDA operation";  // torch's words
  if (sync_debug == SyncDebug::kRaise) TORCH_CHECK(false, kText);
  if (sync_debug == SyncDebug::kWarn) TORCH_WARN(kText);
}

}  // namespace fake_cuda
