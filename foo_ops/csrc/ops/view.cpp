#include "ops/view.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <sstream>

namespace foo {

namespace {

// Number of requests for checks: scopes of several threads may overlap.
std::atomic<int64_t> askers = 0;

// Formats the access as the user wrote it, with numbers instead of variables.
std::string written(const std::string& argument, const Outside& outside) {
  const int64_t* const indices = outside.indices;
  std::ostringstream text;
  text << argument;
  switch (outside.kind) {
    case kElement:
      for (int64_t i = 0; i < outside.count; ++i) text << (i == 0 ? "[" : ", ") << indices[i];
      text << "]";
      break;
    case kRow:
      text << ".row(" << indices[0] << ")";
      break;
    case kFlat:
      text << ".flat[" << indices[0] << "]";
      break;
    case kShape:
      text << ".shape[" << indices[0] << "]";
      break;
    default:
      if (outside.row < 0) {
        text << ".data[" << indices[0];
      } else {
        text << ".row(" << outside.row << ")[" << indices[0];
      }
      if (outside.count > 1) text << ":" << indices[0] + outside.count;
      text << "]";
  }
  return text.str();
}

}  // namespace

bool checks_bounds() {
  return askers.load(std::memory_order_relaxed) > 0;
}

void ask_for_bounds_checks() {
  ++askers;
}

void end_bounds_checks() {
  --askers;
}

void refuse_outside(const std::string& operator_name, const std::string& argument,
                    const Outside& outside) {
  const View& view = *outside.view;
  if (outside.kind == kProduct) {
    const int64_t* const sizes = outside.indices;
    const auto shape = [&](int i) { return c10::ArrayRef<int64_t>(sizes + 2 * i, 2); };
    TORCH_CHECK_VALUE(false, operator_name,
                      ": dot: target, a and b must have shapes [m, n], [m, k] and [k, n], got ",
                      shape(0), ", ", shape(1), ", ", shape(2), " (", outside.place, ")");
  }
  if (outside.kind == kList) {
    const std::string list = argument.substr(0, argument.find('['));
    TORCH_CHECK_INDEX(false, operator_name, ": ", list, "[", outside.indices[0], "] is outside of ",
                      list, ", which has ", outside.indices[1], " tensors (", outside.place, ")");
  }
  TORCH_CHECK_INDEX(false, operator_name, ": ", written(argument, outside), " is outside of ",
                    argument, ", which has shape ", c10::ArrayRef<int64_t>(view.sizes, view.ndim),
                    " (", outside.place, ")");
}

}  // namespace foo
