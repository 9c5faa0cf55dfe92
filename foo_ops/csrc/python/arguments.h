// The arguments of operators between Python and C++.

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

// Calls a function of Python that raises what is wrong with an operator's arguments.
Refusal refusal(pybind11::object function);

// The arguments of a fake kernel. A symbolic number stands for any of its type.
std::vector<c10::IValue> values_of(const pybind11::list& arguments);

}  // namespace foo
