// Operators that write to arguments with a conjugate or negative bit.

#pragma once

#include <string>

#include "launch/registration.h"

namespace foo {

// If the conjugate or negative bit of a written argument is set, makes the operator write to a
// copy, which is then copied back. PyTorch's own fallback assumes that such an operator returns
// what it writes, and otherwise frees memory that it does not own.
Registrations resolve_math_bits(const std::string& operator_name);

}  // namespace foo
