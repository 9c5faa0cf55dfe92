// Binds the checks that fake kernels share with native ones, so that both refuse the same.

#pragma once

#include <pybind11/pybind11.h>

namespace foo {

void bind_shared_checks(pybind11::module_& module);

}  // namespace foo
