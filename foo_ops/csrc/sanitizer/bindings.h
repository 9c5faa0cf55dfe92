// Gives Python the sanitizer, for foo_ops/sanitizer.
#pragma once

#include <pybind11/pybind11.h>

namespace foo::sanitizer {

void bind_sanitizer(pybind11::module_& module);

}  // namespace foo::sanitizer
