// The arguments of a call that are no tensors, as a kernel reads them: each is eight bytes, a
// number or the address of what is larger.

#pragma once

#include <ATen/core/ivalue.h>

#include <array>
#include <forward_list>
#include <string>
#include <vector>

#include "launch/kernel_table.h"
#include "launch/parameter.h"
#include "ops/view.h"

namespace foo {

// Tensors in whose compute type a Scalar is given, and their names, for messages.
struct Common {
  at::ScalarType dtype = at::ScalarType::Undefined;
  const std::string* names = nullptr;
};

// Whether a kernel reads an argument as it is, and nothing can be wrong with it.
inline bool is_plain_number(const Parameter& parameter) {
  using Kind = Parameter::Kind;
  return parameter.kind == Kind::kFloat || parameter.kind == Kind::kInt ||
         parameter.kind == Kind::kBool;
}

// Refuses an argument that is no tensor and not None: a text that is none of the choices, a number
// that the common dtype cannot hold, a list of another length than the schema says.
void check_value(const std::string& name, const Parameter& parameter, const c10::IValue& argument,
                 const Common& common);

// Holds what the eight bytes point to. Without such arguments it costs nothing.
class Values {
 public:
  // Returns the eight bytes of an argument that is not None, or throws what is wrong with it.
  int64_t add(const std::string& name, const Parameter& parameter, const c10::IValue& argument,
              const Common& common) {
    return is_plain_number(parameter) ? scalar_bits(argument)
                                      : hold(name, parameter, argument, common);
  }

  // Appends what a kernel is compiled for besides its tensors: a text, a dtype, or whether an
  // optional argument is there.
  static void sign(const Kernel& kernel, const Parameter& parameter, const c10::IValue& argument,
                   Signature& signature);

  // Lets accesses outside of lists be recorded.
  void check_bounds(Outside& outside);

  // The name of the list that a view is, or null.
  const std::string* name_of(const View* view) const;

 private:
  struct List {
    std::vector<int64_t> bytes;
    int64_t size;
    View view;
    const std::string& name;
  };

  int64_t hold(const std::string& name, const Parameter& parameter, const c10::IValue& argument,
               const Common& common);
  int64_t add_number(const at::Scalar& number, at::ScalarType dtype);
  int64_t add_list(const Parameter& parameter, std::vector<int64_t> bytes);

  // Addresses into these stay what they are.
  std::forward_list<List> lists_;
  std::forward_list<std::array<double, 2>> complex_;
};

}  // namespace foo
