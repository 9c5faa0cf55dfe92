#include <iostream>
#include <utility>
#include <vector>

#include "aten/fallback.h"
#include "check.h"
#include "launch/registration.h"

namespace foo::test {
namespace {

std::vector<std::pair<const char*, void (*)()>>& tests() {
  static std::vector<std::pair<const char*, void (*)()>> list;
  return list;
}

}  // namespace

bool add_test(const char* name, void (*function)()) {
  tests().emplace_back(name, function);
  return true;
}

int run_all() {
  int failed = 0;
  for (const auto& [name, function] : tests()) {
    try {
      function();
      std::cout << "passed " << name << std::endl;
    } catch (const std::exception& error) {
      std::cout << "FAILED " << name << ": " << error.what() << std::endl;
      ++failed;
    }
  }
  std::cout << tests().size() - failed << " of " << tests().size() << " tests passed" << std::endl;
  return failed == 0 && !tests().empty() ? 0 : 1;
}

}  // namespace foo::test

int main() {
  c10::register_privateuse1_backend("foo");
  foo::aten::register_host_kernels(foo::all_operators());
  return foo::test::run_all();
}
