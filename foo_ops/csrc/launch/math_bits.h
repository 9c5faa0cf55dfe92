// Arguments that an operator writes, and whose conjugate or negative bit is set.

#pragma once

#include <string>

#include "launch/registration.h"

namespace foo {

// Lets an operator that writes to its arguments write to copies where the conjugate or the negative
// bit of one is set, and writes these back. PyTorch's own fallback takes for granted that such an
// operator returns what it writes, and else frees memory that it does not own.
Registrations resolve_math_bits(const std::string& operator_name);

}  // namespace foo
