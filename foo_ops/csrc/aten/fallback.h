// Every operator without a kernel of its own on device foo: its CPU kernel over the same memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace foo::aten {

// Takes the operator's arguments from the stack, and leaves its results there.
void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace foo::aten
