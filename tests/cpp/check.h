// Framework of the C++ tests: a test is a function, a failure an exception.
#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace foo::test {

// Registers the function with main, which runs all tests.
bool add_test(const char* name, void (*function)());

template <typename Exception, typename Function>
void check_raises(Function function, const std::string& part) {
  try {
    function();
  } catch (const Exception& error) {
    TORCH_CHECK(std::string(error.what()).find(part) != std::string::npos, "'", part,
                "' is not in '", error.what(), "'");
    return;
  }
  TORCH_CHECK(false, "nothing was raised, expected '", part, "'");
}

}  // namespace foo::test

#define FOO_TEST(name)                                                      \
  static void name();                                                       \
  [[maybe_unused]] static const bool name##_added = add_test(#name, &name); \
  static void name()
