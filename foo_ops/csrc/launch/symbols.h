// Conditions on sizes and numbers that may be unknown while a program is compiled.

#pragma once

#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>

namespace foo {

// Whether a condition that must be true is. If it depends on data, such as a count of nonzero
// elements, torch.compile assumes that it is true and checks it when the program runs.
inline bool holds(const c10::SymBool& condition) {
  return condition.expect_true(__FILE__, __LINE__);
}

// Whether a condition is known to be true; false if it depends on data.
inline bool is_known(const c10::SymBool& condition) {
  return condition.guard_or_false(__FILE__, __LINE__);
}

// Whether sizes equal the expected ones.
inline bool have_sizes(c10::SymIntArrayRef sizes, c10::SymIntArrayRef expected) {
  if (sizes.size() != expected.size()) return false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (!holds(sizes[i].sym_eq(expected[i]))) return false;
  }
  return true;
}

}  // namespace foo
