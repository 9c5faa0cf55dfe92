// Operators whose kernels are in a Python module that is imported at their first call.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace foo {

// Makes calls of the operator import foo_ops.ops, which registers its kernels, and then start
// again; this includes calls from C++, which look nothing up in Python. Lasts as long as the
// handles. An operator that has a kernel for the key keeps it.
std::vector<c10::RegistrationHandleRAII> import_at_first_call(const std::string& operator_name,
                                                              c10::DispatchKey key);

}  // namespace foo
