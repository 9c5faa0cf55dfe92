// torch.distributed on tensors of foo: any CPU backend, such as gloo, works on their memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/ArrayRef.h>

namespace foo::aten {

// Puts a kernel of foo in front of torch's for each collective.
void register_collectives(c10::ArrayRef<c10::OperatorHandle> operators);

}  // namespace foo::aten
