// Binds functions for graphs that torch's own classes lack.
#pragma once

#include <pybind11/pybind11.h>

namespace foo::graphs {

void bind_graphs(pybind11::module_& module);

}  // namespace foo::graphs
