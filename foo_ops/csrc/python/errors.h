// Python exceptions that pass through C++.

#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

namespace foo {

// Rethrows a Python exception as torch does, also on another thread: the caller gets it unchanged.
[[noreturn]] inline void pass_on(pybind11::error_already_set& error) {
  error.restore();
  python_error passed;
  passed.persist();
  throw passed;
}

}  // namespace foo
