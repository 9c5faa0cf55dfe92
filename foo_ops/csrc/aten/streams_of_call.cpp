#include "aten/streams_of_call.h"

#include <optional>

#include "aten/boxed_tensors.h"
#include "device/device.h"
#include "device/stream.h"

namespace foo::aten {

c10::Stream stream_of_call(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::DeviceIndex> of_tensor;
  std::optional<c10::DeviceIndex> named;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      const bool is_first = !of_tensor && tensor.device().type() == device::kFoo;
      if (is_first) of_tensor = tensor.device().index();
    });
    if (argument.isDevice() && argument.toDevice().type() == device::kFoo) {
      named = device::with_index(argument.toDevice()).index();
    }
  }
  return device::current_stream(of_tensor.value_or(named.value_or(device::current_device())));
}

std::set<c10::DeviceIndex> devices_of_call(c10::ArrayRef<c10::IValue> arguments) {
  std::set<c10::DeviceIndex> of_tensors;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.device().type() == device::kFoo) of_tensors.insert(tensor.device().index());
    });
  }
  if (of_tensors.empty()) of_tensors.insert(stream_of_call(arguments).device_index());
  return of_tensors;
}

}  // namespace foo::aten
