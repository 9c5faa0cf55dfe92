#include "ops/tile_scratch.h"

#include <ATen/OpMathType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <cstring>

#include "ops/bounds.h"

namespace foo {

namespace {

// A line of the cache, so that threads and vectors do not share one.
constexpr int64_t kAlignment = 64;

ScratchPool& pool_of_tiles() {
  static auto* pool = new ScratchPool();
  return *pool;
}

}  // namespace

ScratchShape scratch_shape(const std::string& operator_name, const std::string& name,
                           size_t argument, c10::ScalarType like, const int64_t* sizes,
                           int64_t dimensions) {
  const c10::ArrayRef<int64_t> given(sizes, dimensions);
  ScratchShape shape{argument, {given.begin(), given.end()}, {}, 1, 0};
  shape.strides.resize(dimensions);
  int64_t bytes = int64_t(c10::elementSize(at::toOpMathType(like)));
  bool is_too_large = false;
  for (int64_t dimension = dimensions; dimension-- > 0;) {
    TORCH_CHECK_VALUE(given[dimension] >= 0, operator_name, ": scratch ", name,
                      " must have sizes of at least 0, got ", given);
    shape.strides[dimension] = shape.elements;
    is_too_large |= __builtin_mul_overflow(bytes, given[dimension], &bytes);
    shape.elements = bytes == 0 ? 0 : shape.elements * given[dimension];
  }
  is_too_large |= __builtin_add_overflow(bytes, kAlignment - 1, &bytes);
  TORCH_CHECK_VALUE(!is_too_large, operator_name, ": scratch ", name,
                    " must be no larger than a process, got ", given);
  shape.bytes = bytes / kAlignment * kAlignment;
  return shape;
}

Scratch::Scratch(const ScratchShapes& shapes, int64_t place, Outside& outside) : shapes_(shapes) {
  if (shapes.empty()) return;
  int64_t bytes = 0;
  for (const ScratchShape& shape : shapes) bytes += shape.bytes;
  auto* address = static_cast<char*>(memory_.emplace(pool_of_tiles(), place, bytes).get());
  // What has all bits set is a NaN. To use it by mistake shows.
  if (checks_bounds()) std::memset(address, 0xff, bytes);
  for (const ScratchShape& shape : shapes) {
    const auto dimensions = int64_t(shape.sizes.size());
    const int64_t rows = c10::multiply_integers(shape.sizes.begin(), shape.sizes.end() - 1);
    views_.push_back({address, dimensions, shape.sizes.data(), shape.strides.data(), shape.elements,
                      rows, &outside});
    address += shape.bytes;
  }
}

void Scratch::give(int64_t* arguments) const {
  for (size_t i = 0; i < views_.size(); ++i) {
    arguments[shapes_[i].argument] = reinterpret_cast<int64_t>(&views_[i]);
  }
}

int64_t Scratch::argument_of(const View* view) const {
  for (size_t i = 0; i < views_.size(); ++i) {
    if (&views_[i] == view) return int64_t(shapes_[i].argument);
  }
  return -1;
}

}  // namespace foo
