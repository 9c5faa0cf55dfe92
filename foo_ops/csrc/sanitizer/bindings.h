// Binds the sanitizer, and attaches it to every operator.

#pragma once

#include <pybind11/pybind11.h>

namespace foo::sanitizer {

// Attaches the sanitizer to every operator on foo, and to CPU operators that may use pinned memory.
void observe_operators();
void stop_observing_operators();

// Binds the sanitizer for foo_ops/sanitizer.
void bind_sanitizer(pybind11::module_& module);

}  // namespace foo::sanitizer
