// Formulas written in Python.

#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "launch/gradients.h"

namespace foo {

// Wraps a Formula of foo_ops/library/autograd.py; the operator's name is without overload.
std::shared_ptr<const Formula> make_python_formula(const std::string& operator_name,
                                                   const pybind11::object& formula);

}  // namespace foo
