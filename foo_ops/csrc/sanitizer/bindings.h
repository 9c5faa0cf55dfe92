// Gives Python the sanitizer, and puts it around every operator.

#pragma once

#include <pybind11/pybind11.h>

namespace foo::sanitizer {

// The sanitizer's place around every operator on foo, and around those of the CPU that may meet
// pinned memory.

void observe_operators();
void stop_observing_operators();

// Gives Python the sanitizer, for foo_ops/sanitizer.

void bind_sanitizer(pybind11::module_& module);

}  // namespace foo::sanitizer
