#include "launch/device_check.h"

#include <ATen/core/op_registration/adaption.h>

#include <algorithm>

#include "launch/registration.h"

namespace foo {

void check_one_device(const char* operator_name, at::ArrayRef<const at::Tensor*> tensors) {
  const auto first = std::find_if(tensors.begin(), tensors.end(), [](const at::Tensor* tensor) {
    return tensor != nullptr && tensor->device().type() == c10::DeviceType::PrivateUse1;
  });
  if (first == tensors.end()) return;
  const c10::Device expected = (*first)->device();
  for (size_t position = 0; position < tensors.size(); ++position) {
    const at::Tensor* tensor = tensors[position];
    if (tensor == nullptr || tensor->device() == expected) continue;
    const std::string argument = find_operator(operator_name).schema().arguments()[position].name();
    c10::impl::common_device_check_failure(expected, *tensor, operator_name, argument.c_str());
  }
}

}  // namespace foo
