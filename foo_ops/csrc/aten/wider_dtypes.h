// Dtypes that an operator has on CUDA, and not on the CPU.
#pragma once

namespace foo::aten {

// Gives these operators on foo kernels for them. To be called when all operators are registered.
void register_wider_kernels();

}  // namespace foo::aten
