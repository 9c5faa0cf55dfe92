// What a schema says of an operator's work.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace foo::aten {

// Written by the operator, or a result that is.
bool is_written(const c10::Argument& argument);

// Gives a tensor other sizes or strides over the same memory, as a new tensor.
bool is_view(const c10::OperatorHandle& op);

// A view, or a new tensor whose memory is left as it is: no kernel on any device.
bool touches_no_bytes(const c10::OperatorHandle& op);

}  // namespace foo::aten
