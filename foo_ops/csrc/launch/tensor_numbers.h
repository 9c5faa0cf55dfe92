// Operators that take floating-point numbers as tensors, as compiled programs pass them.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace foo {

// Registers a kernel that calls another operator, ``of``. The operator takes the arguments of
// ``of`` first, then optional tensors named "<argument>_number", which replace these arguments.
c10::RegistrationHandleRAII register_tensor_numbers(const std::string& operator_name,
                                                    c10::DispatchKey key, const std::string& of);

}  // namespace foo
