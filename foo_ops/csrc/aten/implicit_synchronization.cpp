#include "aten/implicit_synchronization.h"

#include <algorithm>

#include "aten/boxed_tensors.h"

namespace foo::aten {
namespace {

// Where the argument of a name stands, or behind the last one.
size_t find_argument(const c10::FunctionSchema& schema, const char* name) {
  const auto& arguments = schema.arguments();
  return size_t(std::find_if(arguments.begin(), arguments.end(),
                             [&](const c10::Argument& each) { return each.name() == name; }) -
                arguments.begin());
}

bool is_mask(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

}  // namespace

ImplicitSynchronization::ImplicitSynchronization(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const bool indexes = schema.name().find("index") != std::string::npos;
  const size_t indices = find_argument(schema, "indices");
  const size_t output_size = find_argument(schema, "output_size");
  const size_t count = schema.arguments().size();
  if (indexes && indices < count) {
    when_ = When::kForMasks;
    position_ = indices;
  } else if (!op.hasTag(at::Tag::dynamic_output_shape) &&
             !op.hasTag(at::Tag::data_dependent_output)) {
    when_ = When::kNever;
  } else if (output_size < count) {
    when_ = When::kWithoutOutputSize;
    position_ = output_size;
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
