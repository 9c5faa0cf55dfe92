// The first write to new memory costs more than the work on it: the system clears the memory page
// by page, and the first touch of each page is a fault.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstddef>

namespace foo {

// Bytes of a huge page.
inline constexpr size_t kHugePage = size_t{2} << 20;

// Requests huge pages for the memory of a result that nobody has written yet, and returns it.
// Memory that PyTorch reuses keeps its pages, and foo's allocator has huge ones.
//
// With this, abs of float32 into a new result of 32 and 128 MB took 0.36 and 0.22 of the time, on a
// Zen 3 under a hypervisor.
at::Tensor in_huge_pages(at::Tensor result);

// Returns a new, uninitialized tensor, for a result or as scratch memory.
inline at::Tensor new_tensor(c10::IntArrayRef sizes, const at::TensorOptions& options) {
  return in_huge_pages(at::empty(sizes, options));
}

}  // namespace foo
