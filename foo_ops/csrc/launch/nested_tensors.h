// Nested tensors, which no kernel takes: their rows differ in length, and they have no sizes.
// Kernels of operators of rows get what is in them, by a kernel on the key AutogradNestedTensor.
#pragma once

#include <torch/library.h>

#include <string>
#include <vector>

namespace foo {

// Lets an operator refuse them on every device, with gradients and without, unless its author has
// registered something for them.
std::vector<c10::RegistrationHandleRAII> refuse_nested_tensors(const std::string& operator_name);

// The same for an operator of this package, which may be defined later: what is registered for its
// autograd is not for them.
void refuse_nested_tensors(torch::Library& library, const char* operator_name);

}  // namespace foo
