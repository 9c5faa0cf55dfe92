// Calls between C++ and Python: arguments, formulas, exceptions.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <vector>

#include "launch/autograd.h"
#include "launch/parameter.h"

namespace foo {

// Rethrows a Python exception as torch does, also on another thread: the caller gets it unchanged.
[[noreturn]] inline void pass_on(pybind11::error_already_set& error) {
  error.restore();
  python_error passed;
  passed.persist();
  throw passed;
}

Parameter make_parameter(std::string name, const std::string& kind, bool is_optional,
                         const std::string& role, std::vector<std::string> choices, int64_t length,
                         std::vector<at::ScalarType> own_types, std::string own_types_in_words);

// Converts a value to what Python calls an operator with: dtypes, layouts and memory formats are
// integers in C++, and only the argument's type tells.
pybind11::object to_python(const c10::IValue& value, c10::TypeKind kind);

// Wraps a Python function that raises for an operator's invalid arguments.
Refusal refusal(pybind11::object function, std::vector<Parameter> parameters);

// Converts the arguments of a fake kernel. A symbolic number can be any number of its type.
std::vector<c10::IValue> values_of(const pybind11::list& arguments);

// Wraps a Formula of foo_ops/library/autograd.py; the operator's name is without overload.
std::shared_ptr<const Formula> make_python_formula(const std::string& operator_name,
                                                   const pybind11::object& formula);

}  // namespace foo
