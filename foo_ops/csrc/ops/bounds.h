// Kernels that check every access to a tensor: whether they are wanted, and what they have found.

#pragma once

#include <string>

#include "ops/view.h"

namespace foo {

// Whether kernels check their accesses now, on every thread: someone has asked for it and not yet
// taken it back.
bool checks_bounds();
void ask_for_bounds_checks();
void end_bounds_checks();

// Throws an IndexError for an operator: the access, the tensor's shape and the place.
[[noreturn]] void refuse_outside(const std::string& operator_name, const std::string& argument,
                                 const Outside& outside);

}  // namespace foo
