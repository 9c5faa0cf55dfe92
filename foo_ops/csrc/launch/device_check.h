// Whether the tensors of a call are on one device. torch writes this check in front of the kernels
// of its own devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <type_traits>

namespace foo {

// Where the tensors of a call may be.
enum class Devices {
  kOne,
  kAny,
};

template <typename Argument>
constexpr bool is_tensor = std::is_same_v<std::decay_t<Argument>, at::Tensor> ||
                           std::is_same_v<std::decay_t<Argument>, std::optional<at::Tensor>>;

inline const at::Tensor* tensor_in(const at::Tensor& argument) {
  return argument.defined() ? &argument : nullptr;
}

inline const at::Tensor* tensor_in(const std::optional<at::Tensor>& argument) {
  return argument.has_value() ? tensor_in(*argument) : nullptr;
}

template <typename Argument>
const at::Tensor* tensor_in(const Argument&) {
  return nullptr;
}

// Raises unless all tensors are on the device of the first one on foo. They come in the order of
// the operator's arguments, with null for a missing one.
void check_one_device(const char* operator_name, at::ArrayRef<const at::Tensor*> tensors);

template <typename... Arguments>
void check_devices(const char* operator_name, const Arguments&... arguments) {
  constexpr int kTensors = (0 + ... + (is_tensor<Arguments> ? 1 : 0));
  if constexpr (kTensors > 1) check_one_device(operator_name, {tensor_in(arguments)...});
}

}  // namespace foo
