// Dtypes that an operator has on CUDA, and not on the CPU.
#pragma once

namespace foo::aten {

// Gives these operators on foo kernels for them. To be called when all operators are registered.
void register_wider_kernels();

// The same for the transforms of torch.fft, which torch composes of smaller operators.
void register_half_transforms();

}  // namespace foo::aten
