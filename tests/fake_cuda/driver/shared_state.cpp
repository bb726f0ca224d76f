#include "shared_state.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace fake_cuda {
namespace {

constexpr int64_t kForgottenAfterNs = 2'000'000'000;

void add(uint64_t& word, uint64_t amount) { fake_cuda_store(&word, fake_cuda_load(&word) + amount); }

}  // namespace

SharedState::SharedState(const std::string& path, int num_cards, size_t total_bytes, size_t context_bytes,
                         size_t others_bytes) {
  TORCH_CHECK(num_cards <= FAKE_CUDA_MAX_CARDS, "the simulated machine has at most ", FAKE_CUDA_MAX_CARDS, " cards");
  if (!path.empty()) {
    machine_ = fake_cuda_open_machine(path.c_str(), num_cards, total_bytes, context_bytes, others_bytes, &file_);
    TORCH_CHECK(machine_, "FAKE_CUDA_STATE=", path, ": ", std::strerror(errno));
    return;
  }
  void* mapped = mmap(nullptr, sizeof(fake_cuda_machine), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(mapped != MAP_FAILED, "no memory for the simulated machine: ", std::strerror(errno));
  machine_ = static_cast<fake_cuda_machine*>(mapped);
  fake_cuda_set_up_machine(machine_, num_cards, total_bytes, context_bytes, others_bytes);
}

void SharedState::lock() {
  if (file_ >= 0) TORCH_CHECK(flock(file_, LOCK_EX) == 0, "FAKE_CUDA_STATE: ", std::strerror(errno));
}

void SharedState::unlock() {
  if (file_ >= 0) flock(file_, LOCK_UN);
}

fake_cuda_process* SharedState::place() {
  if (place_) return place_;
  lock();
  for (auto& process : machine_->processes) {
    if (fake_cuda_is_alive(fake_cuda_load(&process.pid))) continue;
    for (auto& share : process.cards) {  // of one that was killed
      fake_cuda_store(&share.has_context, 0);
      fake_cuda_store(&share.reserved_bytes, 0);
    }
    fake_cuda_store(&process.pid, static_cast<uint64_t>(getpid()));
    place_ = &process;
    break;
  }
  unlock();
  TORCH_CHECK(place_, "more than ", FAKE_CUDA_MAX_PROCESSES, " processes use the simulated cards");
  return place_;
}

void SharedState::give_back() {
  if (!place_ || place_->pid != static_cast<uint64_t>(getpid())) return;  // of a parent
  for (auto& share : place_->cards) {
    fake_cuda_store(&share.has_context, 0);
    fake_cuda_store(&share.reserved_bytes, 0);
    auto now = fake_cuda_now_ns() / FAKE_CUDA_SLICE_NS;
    for (auto& slice : share.slices)  // what was launched and not waited for ends with the process
      if (static_cast<int64_t>(slice >> FAKE_CUDA_BUSY_BITS) > now) fake_cuda_store(&slice, 0);
    if (fake_cuda_load(&share.num_launches))
      for (auto ahead = now + 1; ahead < now + FAKE_CUDA_NUM_SLICES / 2; ++ahead)
        if (auto& word = share.parts[ahead % FAKE_CUDA_NUM_SLICES]; word && fake_cuda_is_of(word, ahead))
          fake_cuda_store(&word, 0);
  }
  fake_cuda_store(&place_->pid, 0);
}

CardShare::CardShare(SharedState& state, int machine_index) : state_(state), index_(machine_index) {}

void CardShare::use() {
  if (share_) return;
  share_ = &state_.place()->cards[index_];
  fake_cuda_store(&share_->has_context, 1);
}

bool CardShare::take_bytes(size_t size) {
  state_.lock();
  bool fits = fake_cuda_used_bytes(state_.machine(), index_) + size <= about().total_bytes;
  if (fits) add(share_->reserved_bytes, size);
  state_.unlock();
  return fits;
}

void CardShare::give_bytes(size_t size) { add(share_->reserved_bytes, -size); }

size_t CardShare::used_bytes() { return fake_cuda_used_bytes(state_.machine(), index_); }

std::vector<std::pair<uint64_t, uint64_t>> CardShare::users() {
  std::vector<std::pair<uint64_t, uint64_t>> found;
  for (auto& process : state_.machine()->processes) {
    auto pid = fake_cuda_load(&process.pid);
    if (!fake_cuda_load(&process.cards[index_].has_context) || !fake_cuda_is_alive(pid)) continue;
    found.emplace_back(pid, about().context_bytes + fake_cuda_load(&process.cards[index_].reserved_bytes));
  }
  return found;
}

bool CardShare::is_lost() const { return fake_cuda_load(&about().is_lost) != 0; }
void CardShare::lose() { fake_cuda_store(&state_.machine()->cards[index_].is_lost, 1); }

void CardShare::count_launch() { add(share_->num_launches, 1); }

void CardShare::count_copy(size_t to_card_bytes, size_t to_host_bytes) {
  add(share_->to_card_bytes, to_card_bytes);
  add(share_->to_host_bytes, to_host_bytes);
}

void CardShare::describe(bool has_roofline, int64_t throttle_after_ns, double throttle_clock, bool throttles_by_heat) {
  has_roofline_ = has_roofline;
  throttle_after_ns_ = throttle_after_ns;
  throttle_clock_ = throttle_clock;
  throttles_by_heat_ = throttles_by_heat;
  fake_cuda_store(&state_.machine()->cards[index_].has_parts, has_roofline);
}

double CardShare::clock_at(int64_t at_ns) {
  if (throttle_after_ns_ < 0) return 1;
  auto& card = state_.machine()->cards[index_];
  if (!fake_cuda_load(&card.throttled_from_ns)) {
    if (static_cast<int64_t>(fake_cuda_total_busy_ns(state_.machine(), index_)) < throttle_after_ns_) return 1;
    fake_cuda_store(&card.throttled_clock_pct, static_cast<uint64_t>(100 * throttle_clock_));
    fake_cuda_store(&card.is_throttled_by_heat, throttles_by_heat_);
    fake_cuda_store(&card.throttled_from_ns, static_cast<uint64_t>(at_ns));
  }
  return throttle_clock_;
}

void CardShare::use_parts(int64_t from_ns, int64_t to_ns, const std::array<double, FAKE_CUDA_NUM_PARTS>& shares) {
  if (!has_roofline_) return;
  for (int64_t n = from_ns / FAKE_CUDA_SLICE_NS; n * FAKE_CUDA_SLICE_NS < to_ns; ++n) {
    auto begin = std::max(from_ns, n * FAKE_CUDA_SLICE_NS), end = std::min(to_ns, (n + 1) * FAKE_CUDA_SLICE_NS);
    uint64_t& parts = share_->parts[n % FAKE_CUDA_NUM_SLICES];
    uint64_t word = fake_cuda_load(&parts), fresh = fake_cuda_fresh_parts(n);
    if (!fake_cuda_is_of(word, n)) word = fresh;
    for (int part = 0; part < FAKE_CUDA_NUM_PARTS; ++part) {
      auto more = static_cast<double>(end - begin) * shares[part] / FAKE_CUDA_PART_NS;
      auto sum = std::min<double>(fake_cuda_part(word, part) + more + 0.5, FAKE_CUDA_FULL_PART);
      fresh |= static_cast<uint64_t>(sum) << (part * FAKE_CUDA_PART_BITS);
    }
    fake_cuda_store(&parts, fresh);
  }
}

int64_t CardShare::busy_ns(int64_t from_ns, int64_t to_ns) {
  return fake_cuda_busy_ns(state_.machine(), index_, from_ns, to_ns);
}

// Counts the parts of the interval in which none of this process's streams was known to be busy. They come in no order
// (a stream may lag far behind the host), so recent_ holds the union of the last seconds and what lies ahead.
void CardShare::busy(int64_t from_ns, int64_t to_ns) {
  if (to_ns <= from_ns) return;
  auto next = recent_.upper_bound(from_ns);
  if (next != recent_.begin() && std::prev(next)->second >= from_ns)
    --next;  // the one that reaches into it, or touches
  int64_t begin = from_ns, end = to_ns, reached = from_ns;
  while (next != recent_.end() && next->first <= to_ns) {
    add_slices(reached, next->first);
    reached = std::max(reached, next->second);
    begin = std::min(begin, next->first);
    end = std::max(end, next->second);
    next = recent_.erase(next);
  }
  add_slices(reached, to_ns);
  recent_.emplace_hint(next, begin, end);
  while (recent_.size() > 64 && recent_.begin()->second < from_ns - kForgottenAfterNs) recent_.erase(recent_.begin());
}

void CardShare::add_slices(int64_t from_ns, int64_t to_ns) {
  if (to_ns <= from_ns) return;
  add(share_->busy_ns, to_ns - from_ns);
  for (int64_t n = from_ns / FAKE_CUDA_SLICE_NS; n * FAKE_CUDA_SLICE_NS < to_ns; ++n) {
    auto begin = std::max(from_ns, n * FAKE_CUDA_SLICE_NS), end = std::min(to_ns, (n + 1) * FAKE_CUDA_SLICE_NS);
    uint64_t& slice = share_->slices[n % FAKE_CUDA_NUM_SLICES];
    uint64_t word = fake_cuda_load(&slice), fresh = static_cast<uint64_t>(n) << FAKE_CUDA_BUSY_BITS;
    if (word >> FAKE_CUDA_BUSY_BITS != static_cast<uint64_t>(n)) word = fresh;
    // A process that had this place in the same millisecond may have filled it.
    fake_cuda_store(&slice, std::min(word + static_cast<uint64_t>(end - begin), fresh + FAKE_CUDA_SLICE_NS));
  }
}

}  // namespace fake_cuda
