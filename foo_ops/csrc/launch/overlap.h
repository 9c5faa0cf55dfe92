// Checks for elements of tensors that share memory, and for tensors that may be resized.

#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace foo {

// Whether a tensor has elements, as far as a fake one tells.
bool has_elements(const at::Tensor& tensor);

// Where a tensor that has elements lies: from its first byte to the one after its last. One whose
// sizes are symbols lies anywhere.
struct Span {
  const char* begin;
  const char* end;

  explicit Span(const at::Tensor& tensor);
};

// The elements of a tensor that are also elements of another: none, each at the same index, or
// others. Fake tensors have elements in common only if they have the storage in common: whether
// others would share memory only their data could tell.
enum class Overlap { kNone, kSame, kOther };
Overlap overlap_of(const at::Tensor& one, const at::Tensor& other);

// Whether elements of a tensor share memory.
bool overlaps_itself(const at::Tensor& tensor);

// Throws for an `out` that would change what is not its own if it were resized to the shape of the
// result: where it is part of larger memory, or another tensor of the call lies in its memory.
// Reads only metadata, for fake tensors too.
void check_resizable(const std::string& operator_name, const std::string& parameter,
                     const at::Tensor& out, c10::SymIntArrayRef sizes, at::TensorList others);

}  // namespace foo
