#include "launch/parameter.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <bit>

#include "launch/overlap.h"

namespace foo {

int64_t scalar_bits(const c10::IValue& value) {
  if (value.isDouble()) return std::bit_cast<int64_t>(value.toDouble());
  if (value.isBool()) return value.toBool();
  // Symbolic integers have a value by now.
  return value.isSymInt() ? value.toSymInt().guard_int(__FILE__, __LINE__) : value.toInt();
}

std::vector<std::string> texts_of(const std::vector<Parameter>& parameters) {
  std::vector<std::string> texts;
  for (const Parameter& parameter : parameters) {
    texts.insert(texts.end(), parameter.choices.begin(), parameter.choices.end());
  }
  return texts;
}

c10::Device common_device(const std::string& name, const std::vector<Parameter>& parameters,
                          c10::ArrayRef<c10::IValue> arguments) {
  const Parameter* first = nullptr;
  c10::Device device(c10::kCPU);
  for (size_t i = 0; i < parameters.size(); ++i) {
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      const c10::Device own = tensor.device();
      if (first == nullptr) {
        first = &parameters[i];
        device = own;
      }
      TORCH_CHECK_VALUE(own == device, name, ": ", parameters[i].name, " must be on ", device,
                        " as ", first->name, " is, got ", own);
    });
  }
  return device;
}

int64_t draw_seed(const c10::IValue& generator, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor seed = at::empty({}, at::TensorOptions().dtype(at::kLong).device(device));
  // A torch operator knows the generators of all devices, and locks the one that it draws from.
  seed.random_(generator.toOptional<at::Generator>());
  return *seed.const_data_ptr<int64_t>();
}

void check_generators(const std::string& name, const std::vector<Parameter>& parameters,
                      c10::ArrayRef<c10::IValue> arguments, c10::Device device) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].kind != Parameter::Kind::kGenerator || arguments[i].isNone()) continue;
    const auto own = arguments[i].toGenerator().device().type();
    TORCH_CHECK_VALUE(own == device.type(), name, ": ", parameters[i].name, " must be on ",
                      c10::DeviceTypeName(device.type(), true), " as the tensors are, got ",
                      c10::DeviceTypeName(own, true));
  }
}

void check_can_cast(const std::string& name, const std::string& parameter, at::ScalarType result,
                    const at::Tensor& target) {
  TORCH_CHECK_TYPE(c10::canCast(result, target.scalar_type()), name, ": ", parameter,
                   " must have a dtype that ", dtype_name(result), " can be cast to, got ",
                   dtype_name(target.scalar_type()));
}

std::vector<at::Tensor> other_tensors(c10::ArrayRef<c10::IValue> arguments, size_t index) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (i == index) continue;
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }
  return tensors;
}

void check_apart(const std::string& name, const std::vector<Parameter>& parameters,
                 c10::ArrayRef<c10::IValue> arguments, size_t index) {
  for_each_written(parameters, arguments, [&](size_t i, const at::Tensor& other) {
    if (i >= index) return;
    const auto overlap = overlap_of(other, arguments[index].toTensor());
    TORCH_CHECK(overlap == Overlap::kNone, name, ": ", parameters[index].name,
                " must not share memory with ", parameters[i].name, ", since both are written");
  });
}

}  // namespace foo
