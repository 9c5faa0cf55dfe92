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
  // The fields of each struct: name, type, offset.
  std::map<std::string, std::vector<std::tuple<std::string, std::string, size_t>>> structs;
  // The types of the arguments of each function.
  std::map<std::string, std::vector<std::string>> functions;
  std::map<std::string, std::variant<int64_t, double, std::string>> constants;
};

// tests/project/test_agreement.py compares these facts with foo_ops/kernels.
Agreement agreement();

}  // namespace foo
