#include "ops/parameter.h"

#include <bit>

namespace foo {

int64_t scalar_bits(const c10::IValue& value) {
  if (value.isDouble()) return std::bit_cast<int64_t>(value.toDouble());
  if (value.isBool()) return value.toBool();
  // Symbolic integers have a value by now.
  return value.isSymInt() ? value.toSymInt().guard_int(__FILE__, __LINE__) : value.toInt();
}

c10::Device common_device(const std::string& name, const std::vector<Parameter>& parameters,
                          c10::ArrayRef<c10::IValue> arguments) {
  const Parameter* first = nullptr;
  c10::Device device(c10::kCPU);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].is_tensor() || arguments[i].isNone()) continue;
    const c10::Device own = arguments[i].toTensor().device();
    if (first == nullptr) {
      first = &parameters[i];
      device = own;
    }
    TORCH_CHECK_VALUE(own == device, name, ": ", parameters[i].name, " must be on ", device, " as ",
                      first->name, " is, got ", own);
  }
  return device;
}

}  // namespace foo
