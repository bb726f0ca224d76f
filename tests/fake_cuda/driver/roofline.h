// How long a kernel takes the modelled card: by its arithmetic, its bytes and the multiprocessors that it fills.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/function_schema.h>
#include <c10/util/ArrayRef.h>

#include "streams.h"

namespace fake_cuda {

struct Cost {
  double ns;
  Use use;
};

bool has_roofline();  // else a kernel takes the time of the host, times the slowdown

// Of a kernel that was given these arguments (tensors are the card's) and gave these results.
Cost cost_of(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> given, c10::ArrayRef<c10::IValue> results);
Cost cost_of_copy(size_t bytes_read, size_t bytes_written, int64_t elements);

}  // namespace fake_cuda
