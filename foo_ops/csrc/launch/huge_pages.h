// Memory that is written for the first time costs more than the work on it: the system clears it
// page by page, and the first touch of each one is a fault.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstddef>

namespace foo {

// A huge page of the processor.
inline constexpr size_t kHugePage = size_t{2} << 20;

// Asks the system for huge pages in the memory of a result that nobody has written. It returns the
// result. Memory that PyTorch reuses keeps the pages that it has, and foo's has huge ones.
//
// abs of float32 into a new result of 32 and 128 MB took 0.36 and 0.22 of the time so, on a Zen 3
// under a hypervisor.
at::Tensor in_huge_pages(at::Tensor result);

// A new tensor for a result or to work in, which nobody has written.
inline at::Tensor new_tensor(c10::IntArrayRef sizes, const at::TensorOptions& options) {
  return in_huge_pages(at::empty(sizes, options));
}

}  // namespace foo
