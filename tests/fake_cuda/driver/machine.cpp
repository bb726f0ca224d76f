#include <Python.h>  // first: it sets macros that the standard headers look at

#include "machine.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <pthread.h>
#include <torch/csrc/utils/device_lazy_init.h>

#include "caching_allocator.h"
#include "generator.h"

namespace fake_cuda {

std::recursive_mutex machine_lock;
Settings settings;
std::vector<Card> cards;
Counts counts;
thread_local DeviceIndex current_device = 0;

namespace {

std::unique_ptr<SharedState> state;
int num_queues = 0;
bool initialised = false, forked = false;
thread_local std::vector<int> current_streams;  // by card

constexpr int kInitializationError = 3, kInvalidDevice = 101, kLaunchFailure = 719;

}  // namespace

Locked::Locked(std::recursive_mutex& lock) : lock_(lock) {
  if (lock_.try_lock()) return;
  PyThreadState* thread = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  lock_.lock();
  if (thread) PyEval_RestoreThread(thread);
}

void set_up(Settings given) {
  TORCH_CHECK(cards.empty(), "the simulated cards are set up already");
  settings = std::move(given);
  state = std::make_unique<SharedState>(settings.state_path, settings.machine_cards, settings.total_bytes,
                                        settings.context_bytes, settings.others_bytes);
  cards.resize(settings.cards.size());
  for (DeviceIndex index = 0; index < static_cast<DeviceIndex>(cards.size()); ++index) {
    Card& it = cards[index];
    it.index = index;
    it.share = std::make_unique<CardShare>(*state, settings.cards[index]);
    it.share->describe(settings.tflops > 0, static_cast<int64_t>(1e9 * settings.throttle_after_s),
                       settings.throttle_clock, settings.throttles_by_heat);
    it.memory = std::make_unique<CachingAllocator>(it);
    it.generator = make_generator(index);
    if (!settings.lost_after.empty()) it.lost_after = settings.lost_after.at(settings.cards[index]);
    new_queue(it);
  }
  install_allocators();
  pthread_atfork(nullptr, nullptr, [] {
    forked |= initialised;
    for (auto& it : cards) forked |= it.share->has_context();
    if (!forked) return;
    torch::utils::set_device_in_bad_fork(at::kCUDA, true);
    torch::utils::set_requires_device_init(at::kCUDA, true);  // torch.cuda then refuses in its own words
  });
  TORCH_CHECK(at::detail::getCUDAHooks().hasCUDA() == !cards.empty(),
              "torch has asked for its CUDA hooks before the simulated driver was loaded");
}

void shut_down() {
  if (state) state->give_back();
}

void initialise() { initialised = true; }

bool is_forked() { return forked; }

void raise_cuda_error(int code, const std::string& name, const std::string& text) {
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, code,
      "CUDA error: " + text + "\nSearch for `" + name +
          "' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
          "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might "
          "be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
          "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n");
}

Card& card(DeviceIndex index) {
  if (index < 0 || index >= static_cast<DeviceIndex>(cards.size()))
    raise_cuda_error(kInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal");
  return cards[index];
}

void check_not_lost(const Card& it) {
  if (it.share->is_lost()) raise_cuda_error(kLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure");
}

Card& usable_card(DeviceIndex index) {
  if (forked) raise_cuda_error(kInitializationError, "cudaErrorInitializationError", "initialization error");
  Card& it = card(index);
  check_not_lost(it);
  if (!it.share->has_context()) {
    Locked guard(machine_lock);
    it.share->use();
  }
  return it;
}

bool has_context(DeviceIndex index) { return card(index).share->has_context(); }

Queue* new_queue(Card& it) {
  it.queues.push_back(std::make_unique<Queue>(Queue{num_queues++, it.index}));
  return it.queues.back().get();
}

int& current_stream_id(DeviceIndex device) {
  if (current_streams.size() < cards.size()) current_streams.resize(cards.size(), 0);
  return current_streams.at(device);
}

Queue* current_queue(DeviceIndex device) { return card(device).queues[current_stream_id(device)].get(); }

}  // namespace fake_cuda
