// Checks whether elements of tensors share memory, and whether tensors may be resized.

#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace foo {

// Whether a tensor has elements, as far as a fake tensor tells.
bool has_elements(const at::Tensor& tensor);

// Memory range of a nonempty tensor, from its first byte to the one after its last. With symbolic
// sizes it may be anywhere.
struct Span {
  const char* begin;
  const char* end;

  explicit Span(const at::Tensor& tensor);
};

// Elements that two tensors share: none, each at the same index, or others. Fake tensors share
// elements only if they share the storage: whether other tensors share memory only their data could
// tell.
enum class Overlap { kNone, kSame, kOther };
Overlap overlap_of(const at::Tensor& one, const at::Tensor& other);

// Whether elements of a tensor share memory.
bool overlaps_itself(const at::Tensor& tensor);

// Throws if resizing `out` to the shape of the result would change memory that is not its own: if
// it is part of larger memory, or another tensor of the call lies in its memory. Reads only
// metadata, so that it serves fake tensors too.
void check_resizable(const std::string& operator_name, const std::string& parameter,
                     const at::Tensor& out, c10::SymIntArrayRef sizes, at::TensorList others);

}  // namespace foo
