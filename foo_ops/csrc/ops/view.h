// A tensor as a tile kernel sees it, and accesses out of its bounds.

#pragma once

#include <cstdint>
#include <string>

#include "launch/kernel_table.h"

namespace foo {

struct Outside;

// Strides count elements.
struct View {
  void* data;
  int64_t ndim;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t size;
  // Product of all sizes but the last.
  int64_t rows;
  // Record for a kernel that checks its accesses.
  Outside* outside;
};

// A list of tensors.
struct ViewList {
  const View* first;
  int64_t size;
};

template <>
struct Layout<ViewList> {
  using Struct = ViewList;
  static constexpr const char* name = "ViewList";
  static constexpr Field fields[] = FOO_FIELDS(first, size);
};
static_assert(is_whole<ViewList>());

template <>
struct Layout<Outside>;

template <>
struct Layout<View> {
  using Struct = View;
  static constexpr const char* name = "View";
  static constexpr Field fields[] = FOO_FIELDS(data, ndim, sizes, strides, size, rows, outside);
};
static_assert(is_whole<View>());

// Expression with the index: x[i, j], x.row(i), x.flat[i], behind a row or x.data, x.shape[i] or
// x.strides[i], or a list of tensors, where the view is the list's first.
enum AccessKind : int64_t { kElement, kRow, kFlat, kInRow, kShape, kProduct, kList };

// Most indices that are recorded of an access.
constexpr int64_t kMostIndices = 64;

// The first access out of a tensor's bounds in a call. The kernel has not performed it.
struct Outside {
  // Whether there was one. The thread that sets it writes the rest.
  int64_t is_found;
  const View* view;
  int64_t kind;
  // For kInRow, the row, or -1 for the data of the whole tensor.
  int64_t row;
  // For kInRow, the number of elements from the index on; else the number of indices.
  int64_t count;
  // Position in the user's file, as text that lives as long as the kernel.
  const char* place;
  int64_t indices[kMostIndices];
};

template <>
struct Layout<Outside> {
  using Struct = Outside;
  static constexpr const char* name = "Outside";
  static constexpr Field fields[] = FOO_FIELDS(is_found, view, kind, row, count, place, indices);
};
static_assert(is_whole<Outside>());

// Whether kernels check every access to a tensor now, on all threads: somebody has requested checks
// and not yet ended them.
bool checks_bounds();
void ask_for_bounds_checks();
void end_bounds_checks();

// Throws an IndexError for an operator: the access, the tensor's shape and the place.
[[noreturn]] void refuse_outside(const std::string& operator_name, const std::string& argument,
                                 const Outside& outside);

}  // namespace foo
