// Operators of which a card gives the shapes of results alone, for a card that is faster than the host.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "tensors.h"

namespace fake_cuda {

// Whether its numbers count: those of small tensors, whole ones, truth values and doubles, by which others are chosen,
// counted and divided, and in which results leave the card.
bool has_numbers(const Tensor& tensor);

// Whether an operator can be left out: it has a tensor without numbers, and torch knows the shapes of its results.
bool has_known_shapes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> given);

// Puts results for the arguments on the stack, which are tensors without memory (`shape_of`) of those given: such ones,
// or the very arguments. Returns false, and remembers it, where the operator's meta kernel refuses.
bool call_for_shapes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> given, torch::jit::Stack* stack);

// What becomes of a result that has numbers, though they were not computed: ones, since others may divide by it; zeros
// where they may be indices.
void put_numbers(const Tensor& result);

Tensor shape_of(const Tensor& tensor);  // as a meta tensor

}  // namespace fake_cuda
