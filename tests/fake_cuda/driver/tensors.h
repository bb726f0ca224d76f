// Tensors of a card and the host's view of their memory.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <string>

#include "caching_allocator.h"

namespace fake_cuda {

using at::Tensor;

// Nothing above the backend: no autograd, no autocast.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

inline bool is_on_card(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }
inline char* storage_start(const Tensor& tensor) {
  return static_cast<char*>(const_cast<void*>(tensor.storage().data_ptr().get()));
}

Tensor host_view(const Tensor& tensor);  // a CPU tensor on the same memory, sparse ones too

// A launch on that stream reads or writes the tensor.
void note_tensor_access(const Tensor& tensor, Queue* queue, uint64_t tick, bool is_write, const std::string& by);

}  // namespace fake_cuda
