// Dtypes that an operator has on CUDA but not on the CPU.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/ArrayRef.h>

namespace foo::aten {

// Registers foo kernels for such dtypes, for those of the operators that have them.
void register_wider_kernels(c10::ArrayRef<c10::OperatorHandle> operators);

// Same for the transforms of torch.fft, which torch composes of smaller operators.
void register_half_transforms(c10::ArrayRef<c10::OperatorHandle> operators);

}  // namespace foo::aten
