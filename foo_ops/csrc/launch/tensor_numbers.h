// Operators that take floating-point numbers in tensors, as compiled programs have them.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace foo {

// Gives an operator a kernel that calls another one, ``of``, whose arguments it begins with. Those
// that follow are optional tensors, named "<argument>_number", which replace these arguments.
c10::RegistrationHandleRAII register_tensor_numbers(const std::string& operator_name,
                                                    c10::DispatchKey key, const std::string& of);

}  // namespace foo
