// Dtypes that an operator has on CUDA, and not on the CPU.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/ArrayRef.h>

namespace foo::aten {

// Gives those of the operators that have such dtypes kernels for them on foo.
void register_wider_kernels(c10::ArrayRef<c10::OperatorHandle> operators);

// The same for the transforms of torch.fft, which torch composes of smaller operators.
void register_half_transforms(c10::ArrayRef<c10::OperatorHandle> operators);

}  // namespace foo::aten
