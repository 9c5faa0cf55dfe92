// What a schema says of an operator: its work, its tensors, and whether the host waits for it.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <utility>

namespace foo::aten {

// What a schema says of an operator's work.

// Written by the operator, or a result that is.
bool is_written(const c10::Argument& argument);

// Gives a tensor other sizes or strides over the same memory, as a new tensor.
bool is_view(const c10::OperatorHandle& op);

// A view, or a new tensor whose memory is left as it is: no kernel on any device.
bool touches_no_bytes(const c10::OperatorHandle& op);

// The tensors among the arguments and results of a boxed call, also those in lists.

template <typename Function>
void for_each_tensor(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, function);
  }
}

// Replaces each tensor by what the function makes of it.
template <typename Function>
void replace_tensors(c10::IValue& value, Function function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = function(value.toTensor());
  } else if (value.isList()) {
    const auto elements = value.toListRef();
    const auto may_hold_tensors = [](const c10::IValue& element) {
      return element.isTensor() || element.isList();
    };
    if (std::none_of(elements.begin(), elements.end(), may_hold_tensors)) return;
    // The caller may hold the list, so it gets a new one.
    c10::impl::GenericList list = value.toList().copy();
    for (size_t position = 0; position < list.size(); ++position) {
      c10::IValue element = list.get(position);
      replace_tensors(element, function);
      list.set(position, std::move(element));
    }
    value = std::move(list);
  }
}

// Which operators make the host wait for the device: those that give Python a number, and those
// whose results' sizes depend on values.

class ImplicitSynchronization {
 public:
  // Never.
  ImplicitSynchronization() = default;
  explicit ImplicitSynchronization(const c10::OperatorHandle& op);

  bool is_there(c10::ArrayRef<c10::IValue> arguments) const;

 private:
  enum class When { kNever, kAlways, kForMasks, kWithoutOutputSize };

  When when_ = When::kNever;
  // The argument that decides.
  size_t position_ = 0;
};

}  // namespace foo::aten
