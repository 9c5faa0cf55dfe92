// Nested tensors, which no kernel takes: their rows differ in length, and they have no sizes.
#pragma once

#include <torch/library.h>

#include <string>
#include <vector>

namespace foo {

// Lets an operator refuse them on every device, in front of autograd and in inference mode.
std::vector<c10::RegistrationHandleRAII> refuse_nested_tensors(const std::string& operator_name);

// The same for an operator that may be defined later.
void refuse_nested_tensors(torch::Library& library, const char* operator_name);

}  // namespace foo
