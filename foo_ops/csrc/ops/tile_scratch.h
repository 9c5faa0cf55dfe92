// The memory that a tile kernel works in: views like those of tensors, for a call or for a thread.

#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string>

#include "launch/scratch_memory.h"
#include "ops/view.h"

namespace foo {

// One view of it, in the type that elements of an argument are computed in.
struct ScratchOption {
  int64_t like;
  int64_t dimensions;
  bool is_per_call;
};

struct ScratchShape {
  // The position of the view among the kernel's arguments.
  size_t argument;
  c10::SmallVector<int64_t, 4> sizes;
  // Of contiguous elements.
  c10::SmallVector<int64_t, 4> strides;
  int64_t elements;
  // Up to where the next view may begin.
  int64_t bytes;
};

// Throws for sizes that no memory has.
ScratchShape scratch_shape(const std::string& operator_name, const std::string& name,
                           size_t argument, c10::ScalarType like, const int64_t* sizes,
                           int64_t dimensions);

using ScratchShapes = c10::SmallVector<ScratchShape, 2>;

// Holds the memory and the views of one call, or of a thread of it. Where accesses are checked the
// memory is full of NaN, or of -1.
class Scratch {
 public:
  Scratch(const ScratchShapes& shapes, int64_t place, Outside& outside);

  // Writes the addresses of the views where the kernel finds its arguments.
  void give(int64_t* arguments) const;
  // Returns the argument that a view is, or -1.
  int64_t argument_of(const View* view) const;

 private:
  const ScratchShapes& shapes_;
  std::optional<ScratchMemory> memory_;
  c10::SmallVector<View, 2> views_;
};

}  // namespace foo
