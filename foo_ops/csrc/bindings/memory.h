// Binds the device's memory: statistics, blocks and pools.

#pragma once

#include <pybind11/pybind11.h>

namespace foo {

void bind_memory(pybind11::module_& module);

}  // namespace foo
