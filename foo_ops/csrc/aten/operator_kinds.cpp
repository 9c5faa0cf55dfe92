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

}  // namespace foo::aten
