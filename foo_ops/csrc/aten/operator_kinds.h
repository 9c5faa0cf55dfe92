// Properties of an operator that follow from its schema: its work, its tensors, and whether the
// host waits for it.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <utility>

namespace foo::aten {

// Whether the operator writes this argument, or returns it as a written one.
bool is_written(const c10::Argument& argument);

// Whether the operator returns a new tensor with other sizes or strides over the same memory.
bool is_view(const c10::OperatorHandle& op);

// Whether the operator is a view, or makes a new tensor with uninitialized memory: no kernel on any
// device.
bool touches_no_bytes(const c10::OperatorHandle& op);

// Calls the function for each tensor among a boxed call's arguments or results, also in lists.
template <typename Function>
void for_each_tensor(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, function);
  }
}

// Replaces each tensor by the function's result.
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
    // The caller may hold the list: modify a copy.
    c10::impl::GenericList list = value.toList().copy();
    for (size_t position = 0; position < list.size(); ++position) {
      c10::IValue element = list.get(position);
      replace_tensors(element, function);
      list.set(position, std::move(element));
    }
    value = std::move(list);
  }
}

// Tells which operators make the host wait for the device: those that return a number to Python,
// and those whose results' sizes depend on values.
class ImplicitSynchronization {
 public:
  // An operator that never waits.
  ImplicitSynchronization() = default;
  explicit ImplicitSynchronization(const c10::OperatorHandle& op);

  bool is_there(c10::ArrayRef<c10::IValue> arguments) const;

 private:
  enum class When { kNever, kAlways, kForMasks, kWithoutOutputSize };

  When when_ = When::kNever;
  // Position of the argument that decides.
  size_t position_ = 0;
};

}  // namespace foo::aten
