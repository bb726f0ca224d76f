// Kernels: the host's, on the memory of the card.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <torch/library.h>

namespace fake_cuda {

// Runs any operator by its CPU kernel: every tensor of the card is replaced by a view of its memory, results become
// tensors of the card, random numbers come from the card's generator, and the stream is busy for as long as it took.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

inline torch::CppFunction on_host() { return torch::CppFunction::makeFromBoxedFunction<&run_on_host>(); }

}  // namespace fake_cuda
