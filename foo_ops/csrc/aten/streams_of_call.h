// Where an operator runs.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>

#include <set>

namespace foo::aten {

// The current stream of the first tensor's device, else that of the device that an argument names,
// else that of the current one.
c10::Stream stream_of_call(c10::ArrayRef<c10::IValue> arguments);

// The devices of all tensors, or else those that arguments name, or else the current one.
std::set<c10::DeviceIndex> devices_of_call(c10::ArrayRef<c10::IValue> arguments);

}  // namespace foo::aten
