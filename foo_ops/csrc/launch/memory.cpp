#include "launch/memory.h"

#include <sys/mman.h>

#include <cstdint>

namespace foo {

at::Tensor in_huge_pages(at::Tensor result) {
#ifdef MADV_HUGEPAGE
  const size_t bytes = result.storage().nbytes();
  // Smaller memory may contain no whole huge page.
  if (bytes < 2 * kHugePage || !result.is_cpu()) return result;
  const auto begin = reinterpret_cast<uintptr_t>(result.storage().mutable_data());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + bytes) / kHugePage * kHugePage;
  // A system without huge pages refuses, and the memory stays as it is.
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return result;
}

}  // namespace foo
