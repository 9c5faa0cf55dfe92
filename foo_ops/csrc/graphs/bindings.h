// Gives Python what torch's own classes of graphs do not.
#pragma once

#include <pybind11/pybind11.h>

namespace foo::graphs {

void bind_graphs(pybind11::module_& module);

}  // namespace foo::graphs
