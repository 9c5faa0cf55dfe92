#include "aten/operator_kinds.h"

#include <algorithm>

namespace foo::aten {
namespace {

bool is_alias(const c10::Argument& result) {
  return result.alias_info() != nullptr && !is_written(result);
}

}  // namespace

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_view(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  return !schema.returns().empty() &&
         std::none_of(schema.arguments().begin(), schema.arguments().end(), is_written) &&
         std::all_of(schema.returns().begin(), schema.returns().end(), is_alias);
}

bool touches_no_bytes(const c10::OperatorHandle& op) {
  return is_view(op) || op.schema().name().starts_with("aten::empty");
}

namespace {

bool is_mask(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

}  // namespace

ImplicitSynchronization::ImplicitSynchronization(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const bool indexes = schema.name().find("index") != std::string::npos;
  const auto indices = schema.argumentIndexWithName("indices");
  const auto output_size = schema.argumentIndexWithName("output_size");
  if (indexes && indices) {
    when_ = When::kForMasks;
    position_ = *indices;
  } else if (!op.hasTag(at::Tag::dynamic_output_shape) &&
             !op.hasTag(at::Tag::data_dependent_output)) {
    when_ = When::kNever;
  } else if (output_size) {
    when_ = When::kWithoutOutputSize;
    position_ = *output_size;
  } else {
    when_ = When::kAlways;
  }
}

bool ImplicitSynchronization::is_there(c10::ArrayRef<c10::IValue> arguments) const {
  switch (when_) {
    case When::kNever:
      return false;
    case When::kAlways:
      return true;
    case When::kWithoutOutputSize:
      return arguments[position_].isNone();
    case When::kForMasks: {
      bool has_mask = false;
      for_each_tensor(arguments[position_],
                      [&](const at::Tensor& index) { has_mask |= is_mask(index); });
      return has_mask;
    }
  }
  return false;
}

}  // namespace foo::aten
