// copy_: within a card, between cards, and over PCIe.
//
// A non-blocking copy between pinned memory and a card is only queued. It is made when something that the order puts
// after it runs, or the host waits for it: the latest moment that a real card could choose. So who reads its target too
// early finds garbage, and who changes its source too early has the change copied.
#include <ATen/ops/resolve_conj.h>
#include <torch/library.h>

#include "machine.h"
#include "roofline.h"
#include "shapes.h"
#include "tensors.h"

namespace fake_cuda {
namespace {

struct Copy {
  const Tensor& to;
  const Tensor& from;
  bool is_to_card = is_on_card(to), is_from_card = is_on_card(from);
  bool crosses_pcie = is_to_card != is_from_card;
  bool joins_cards = is_to_card && is_from_card && to.get_device() != from.get_device();

  // On the source's current stream, as CUDA.
  Queue* queue() const { return current_queue((is_from_card ? from : to).device().index()); }
  bool is_pinned_on_host() const { return fake_cuda::is_pinned((is_from_card ? to : from).storage().data_ptr().get()); }
};

void enqueue(const Copy& copy, Queue* queue, const Tensor& from, const Tensor& to) {
  auto began_ns = now_ns();
  auto tick = launch(queue);
  Queue* other = copy.joins_cards ? current_queue(copy.to.device().index()) : nullptr;
  if (other) {  // CUDA orders the two cards' streams by itself
    merge(queue->known, other->known);
    queue->busy_until_ns = std::max(queue->busy_until_ns, other->busy_until_ns);
    queue->push([other, position = other->num_issued] { other->drain(position); });
  }
  if (copy.is_from_card) note_tensor_access(copy.from, queue, tick, false, "copy_");
  if (copy.is_to_card) note_tensor_access(copy.to, queue, tick, true, "copy_");
  // The host's storage is kept, as torch's pinned allocator does; the card's is not: who frees it too early loses it.
  c10::Storage kept;
  if (copy.crosses_pcie) kept = copy.is_from_card ? copy.to.storage() : copy.from.storage();
  if (settings.computes || copy.crosses_pcie || has_numbers(copy.from))
    queue->push([from, to, kept] {
      BelowAutograd below;
      to.copy_(from);
    });
  else
    put_numbers(copy.to);
  for (auto& side : {copy.from, copy.to})
    if (Block* block = is_on_card(side) ? block_of(side.storage().data_ptr()) : nullptr; block && block->owner == queue)
      block->queued = queue->num_issued;
  if (copy.crosses_pcie) {
    size_t bytes = copy.to.nbytes();
    ++(copy.is_to_card ? counts.to_card : counts.to_host);
    cards[queue->device].share->count_copy(copy.is_to_card ? bytes : 0, copy.is_to_card ? 0 : bytes);
    bool is_slow = settings.pageable_gbps > 0 && !copy.is_pinned_on_host();
    double gbps = is_slow ? settings.pageable_gbps : settings.copy_gbps;
    busy(queue, began_ns, gbps > 0 ? static_cast<double>(bytes) / gbps : 0, {0, 0, 0});  // copy engines do it
    return;
  }
  queue->drain(queue->num_issued);
  Cost cost{settings.slowdown * static_cast<double>(now_ns() - began_ns) + 1e3 * settings.kernel_us, {}};
  if (has_roofline()) cost = cost_of_copy(from.nbytes(), to.nbytes(), to.numel());
  compute(queue, began_ns, cost.ns, cost.use);
  if (other) {
    merge(other->known, queue->known);
    other->busy_until_ns = std::max(other->busy_until_ns, queue->busy_until_ns);
  }
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src) || self.numel() == 0) return self;
  Copy copy{self, src};
  Queue* queue = copy.queue();
  usable_card(queue->device);
  if (copy.crosses_pcie && !non_blocking) tell_of_wait();
  BelowAutograd below;
  Tensor from = host_view(src.expand(self.sizes())), to = host_view(self);
  bool is_queued = copy.crosses_pcie && non_blocking && copy.is_pinned_on_host();
  // As CUDA documents it: a pageable source is staged before the call returns, without waiting for the card, so it may
  // change at once; a pageable target is waited for.
  if (!copy.is_from_card && !is_queued) from = from.clone();
  bool waits = copy.crosses_pcie && !is_queued && (copy.is_from_card || !non_blocking);
  if (from.is_conj() != to.is_conj()) from = from.resolve_conj();
  spend_launch();
  {
    Locked guard(machine_lock);
    enqueue(copy, queue, from, to);
  }
  if (waits) synchronize(queue);
  return self;
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("copy_", copy_); }

}  // namespace
}  // namespace fake_cuda
