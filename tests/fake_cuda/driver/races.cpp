#include "races.h"

#include <algorithm>
#include <utility>

#include "machine.h"

namespace fake_cuda {
namespace {

std::vector<std::string> violations;

std::string stream_name(int number) { return "stream " + std::to_string(number); }

void violated(const std::string& what) {
  violations.push_back(what);
  TORCH_CHECK(!settings.strict, "simulated CUDA: ", what);
}

}  // namespace

void note_access(Uses& uses, Queue* queue, uint64_t tick, bool is_write, const std::string& by) {
  auto by_stream = by + " on " + stream_name(queue->number);
  if (uses.writer >= 0 && uses.writer != queue->number && !covers(queue->known, uses.writer, uses.written))
    violated(by_stream + " uses memory that " + stream_name(uses.writer) + " may still be writing");
  if (!is_write) {
    uses.reads[queue->number] = tick;
    return;
  }
  for (auto& [reader, read] : uses.reads)
    if (reader != queue->number && !covers(queue->known, reader, read))
      violated(by_stream + " writes memory that " + stream_name(reader) + " may still be reading");
  uses = {queue->number, tick, {}};
}

void note_free(const Uses& uses, Queue* owner, const std::vector<Queue*>& recorded) {
  Clocks all = uses.reads;
  if (uses.writer >= 0) all[uses.writer] = std::max(all[uses.writer], uses.written);
  for (auto& [number, tick] : all) {
    if (number == owner->number || covers(owner->known, number, tick) || covers(host_known, number, tick)) continue;
    auto is_it = [number = number](Queue* queue) { return queue->number == number; };
    if (std::none_of(recorded.begin(), recorded.end(), is_it))  // in a destructor, which can't raise
      violations.push_back("memory of " + stream_name(owner->number) + " is freed while " + stream_name(number) +
                           " may still use it, without record_stream");
  }
}

std::vector<std::string> take_violations() {
  Locked guard(machine_lock);
  return std::exchange(violations, {});
}

}  // namespace fake_cuda
