// The operators of the dispatcher, for rules that give many of them a kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace foo {

// All operators that are defined now.
std::vector<c10::OperatorHandle> all_operators();

}  // namespace foo
