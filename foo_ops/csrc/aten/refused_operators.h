// Operators that torch has for CUDA and its libraries alone, and that foo refuses.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace foo::aten {

// Names the replacement of an operator, for its error message; empty where none is known.
std::string instead_of(const c10::OperatorName& name);

}  // namespace foo::aten
