// Which bytes of a storage belong to a tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace foo::sanitizer {

struct ByteRange {
  size_t begin;
  size_t end;
};

// In ascending order and apart from each other. None for a tensor without elements.
std::vector<ByteRange> byte_ranges(const at::Tensor& tensor);

}  // namespace foo::sanitizer
