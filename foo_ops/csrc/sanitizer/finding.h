// What is wrong: an access, and what it collides with.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "sanitizer/shadow.h"

namespace foo::sanitizer {

// A tensor as a finding shows it, also when it is gone.
struct Description {
  std::vector<int64_t> shape;
  std::optional<at::ScalarType> dtype;
  c10::Device device{c10::kCPU};
  // Of all bytes between its first and its last.
  uintptr_t address = 0;
  size_t bytes = 0;
};

enum class Deed { kRead, kWrite, kAllocation, kFree };

// One side of a finding. The host has no stream.
struct Party {
  Deed deed;
  std::string operator_name;
  std::optional<c10::Stream> stream;
  Stack stack;
};

struct Finding {
  const char* kind;
  Description tensor;
  Party now;
  std::optional<Party> before;
  // Of memory that was freed: who may still be using it.
  std::optional<Party> user;
};

using Findings = std::vector<Finding>;

inline constexpr const char* kRace = "race";
inline constexpr const char* kUseAfterFree = "use after free";
inline constexpr const char* kUnsynchronizedHostRead = "unsynchronized host read";
inline constexpr const char* kHostWriteDuringCopy = "host write during copy";
inline constexpr const char* kUninitializedRead = "uninitialized read";
inline constexpr const char* kHostAccess = "host access";

}  // namespace foo::sanitizer
