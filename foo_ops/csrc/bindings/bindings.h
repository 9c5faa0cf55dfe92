// The parts of foo_ops._C that module.cpp puts together.
#pragma once

#include <pybind11/pybind11.h>

namespace foo {

// Binds the facts that this library shares with the Python kernels: structs, functions, constants.
// tests/project/test_agreement.py compares them with foo_ops/kernels.
void bind_agreement(pybind11::module_& module);

// Binds functions that look for changes of a weight.
void bind_fingerprints(pybind11::module_& module);

// Binds plans of calls: their parallel loops, and how threads share the jobs.
void bind_plans(pybind11::module_& module);

// Binds the device's memory: statistics, blocks and pools.
void bind_memory(pybind11::module_& module);

namespace graphs {

// Binds functions for graphs that torch's own classes lack.
void bind_graphs(pybind11::module_& module);

// Binds programs of recorded calls, and snapshots of the objects that they depend on.
void bind_programs(pybind11::module_& module);

}  // namespace graphs

namespace sanitizer {

// Binds the sanitizer for foo_ops/sanitizer.
void bind_sanitizer(pybind11::module_& module);

}  // namespace sanitizer

}  // namespace foo
