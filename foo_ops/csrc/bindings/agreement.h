// Facts that this library shares with the Python kernels: structs, functions, constants.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

namespace foo {

struct Agreement {
  // Fields of each struct: name, type, offset.
  std::map<std::string, std::vector<std::tuple<std::string, std::string, size_t>>> structs;
  // Argument types of each function.
  std::map<std::string, std::vector<std::string>> functions;
  std::map<std::string, std::variant<int64_t, double, std::string>> constants;
  // Names of attention's options in the schemas.
  std::vector<std::string> attention_options;
};

// Returns the facts; tests/project/test_agreement.py compares them with foo_ops/kernels.
Agreement agreement();

}  // namespace foo
