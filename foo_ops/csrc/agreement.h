// Facts that this library and the kernels, which are Python, must share: structs, functions,
// constants.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

namespace foo {

struct Agreement {
  // For each struct its fields: name, type, offset.
  std::map<std::string, std::vector<std::tuple<std::string, std::string, size_t>>> structs;
  // For each function the types of its arguments.
  std::map<std::string, std::vector<std::string>> functions;
  std::map<std::string, std::variant<int64_t, double, std::string>> constants;
};

// For tests/project/test_agreement.py, which compares it with foo_ops/kernels.
Agreement agreement();

}  // namespace foo
