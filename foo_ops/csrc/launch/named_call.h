// Calls an operator with arguments that are known by their names.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

namespace foo {

// A call's arguments besides the named ones have their defaults, so that callers need not know
// them.
class NamedCall {
 public:
  NamedCall(const std::string& operator_name, const std::vector<std::string>& arguments);

  // Calls the operator and returns its results. The values are those of the named arguments, in
  // their order.
  torch::jit::Stack operator()(std::vector<c10::IValue> values) const;

 private:
  c10::OperatorHandle operator_;
  torch::jit::Stack defaults_;
  std::vector<int64_t> places_;
};

}  // namespace foo
