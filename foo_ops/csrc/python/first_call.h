// Operators whose kernels come from a module of Python that is imported at their first call.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace foo {

// Lets calls of the operator import foo_ops.ops, which registers its kernels, and then start again:
// also calls from C++, for which nothing is looked up in Python. Lasts as long as the handles. An
// operator that has a kernel for the key keeps that.
std::vector<c10::RegistrationHandleRAII> import_at_first_call(const std::string& operator_name,
                                                              c10::DispatchKey key);

}  // namespace foo
