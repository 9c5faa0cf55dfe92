#include "launch/named_call.h"

#include <c10/util/Exception.h>

#include <utility>

#include "launch/registration.h"

namespace foo {

NamedCall::NamedCall(const std::string& operator_name, const std::vector<std::string>& arguments)
    : operator_(find_operator(operator_name)) {
  for (const auto& argument : operator_.schema().arguments()) {
    defaults_.push_back(argument.default_value().value_or(c10::IValue()));
  }
  for (const std::string& argument : arguments) {
    const auto place = operator_.schema().argumentIndexWithName(argument);
    TORCH_INTERNAL_ASSERT(place.has_value(), operator_name, " has no argument ", argument);
    places_.push_back(*place);
  }
}

torch::jit::Stack NamedCall::operator()(std::vector<c10::IValue> values) const {
  TORCH_INTERNAL_ASSERT(values.size() == places_.size());
  torch::jit::Stack stack = defaults_;
  for (size_t i = 0; i < values.size(); ++i) stack[places_[i]] = std::move(values[i]);
  operator_.callBoxed(stack);
  return stack;
}

}  // namespace foo
