// New tensors of foo, for kernels of foo: no operator is called and none counts.
#pragma once

#include <ATen/core/Tensor.h>

namespace foo::aten {

// Without initialization. No strides mean contiguous ones.
at::Tensor new_tensor(at::IntArrayRef size, at::IntArrayRef stride,
                      const c10::TensorOptions& options);

}  // namespace foo::aten
