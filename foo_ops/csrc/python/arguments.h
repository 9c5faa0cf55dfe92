// Conversion of operators' arguments between Python and C++.

#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "launch/parameter.h"

namespace foo {

Parameter make_parameter(std::string name, const std::string& kind, bool is_optional,
                         const std::string& role, std::vector<std::string> choices, int64_t length,
                         std::vector<at::ScalarType> own_types, std::string own_types_in_words);

// Wraps a Python function that raises for an operator's invalid arguments.
Refusal refusal(pybind11::object function);

// Converts the arguments of a fake kernel. A symbolic number can be any number of its type.
std::vector<c10::IValue> values_of(const pybind11::list& arguments);

}  // namespace foo
