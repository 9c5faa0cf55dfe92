// Operators of a program that are quicker done without the dispatcher, for tensors that allow it.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "graphs/instruction.h"

namespace foo::graphs {

// Looks up the shortcut of an operator; returns nullptr if it has none.
Shortcut shortcut_of(const c10::OperatorName& name);

// Whether a tensor on the CPU has 1 to 16 int64, such as the positions of as many tokens.
bool are_few_integers(const at::Tensor& tensor);

// Whether a call is made by a shortcut that makes its result by `set_view`.
bool makes_view(const OperatorCall& call);

// Makes `result` a view of the base's memory. What `release_view` has left is used again, for which
// nothing is allocated.
void set_view(at::Tensor& result, const at::Tensor& base, at::IntArrayRef sizes,
              at::IntArrayRef strides, int64_t offset);

// Lets go of the memory of such a view, unless others hold the view.
void release_view(at::Tensor& view);

}  // namespace foo::graphs
