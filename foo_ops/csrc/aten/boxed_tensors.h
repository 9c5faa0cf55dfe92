// The tensors among the arguments and results of a boxed call, also those in lists.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <utility>

namespace foo::aten {

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

}  // namespace foo::aten
