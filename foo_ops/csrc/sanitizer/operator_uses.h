// What an operator does to its arguments, read from its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

#include "aten/implicit_synchronization.h"
#include "sanitizer/tracker.h"

namespace foo::sanitizer {

struct ArgumentUse {
  Reads reads = Reads::kNothing;
  bool is_read = false;
  bool is_written = false;
};

// Whose memory a result has: an argument's, as a view or because it is one that was written; or new
// memory.
enum class ResultUse { kView, kWritten, kNew };

struct OperatorUses {
  OperatorUses() = default;
  explicit OperatorUses(const c10::OperatorHandle& op);

  // What this call does to one of its arguments: with a factor 0 the values of self do not count.
  ArgumentUse use(size_t argument, c10::ArrayRef<c10::IValue> values) const;

  std::string name;
  std::vector<ArgumentUse> arguments;
  std::vector<ResultUse> results;
  // The factor of self, as addmm has it.
  std::optional<int> beta;
  // New memory is handed out as it is.
  bool leaves_memory_unwritten = false;
  aten::ImplicitSynchronization synchronization;
};

}  // namespace foo::sanitizer
