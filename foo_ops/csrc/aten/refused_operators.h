// Operators that torch has only for CUDA and its libraries, and that foo refuses.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace foo::aten {

// Returns the replacement of an operator for its error message; empty if none is known.
std::string instead_of(const c10::OperatorName& name);

}  // namespace foo::aten
