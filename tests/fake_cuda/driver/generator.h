// A card's random numbers: torch's CPU generator under the card's name (so the numbers are not those of a real card).
#pragma once

#include <ATen/core/Generator.h>

namespace fake_cuda {

at::Generator make_generator(c10::DeviceIndex device);

}  // namespace fake_cuda
