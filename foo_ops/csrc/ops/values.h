// Arguments of a call that are not tensors, and lists of tensors, as a kernel reads them.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <forward_list>
#include <string>
#include <vector>

#include "launch/kernel_table.h"
#include "launch/parameter.h"
#include "ops/view.h"

namespace foo {

// Refuses a list that is empty, or has tensors of several dtypes or numbers of dimensions.
void check_list(const std::string& name, const Parameter& parameter, at::TensorList tensors);

// Finds tensors of a call that share memory. It sorts them, since comparing all pairs would take
// longer than the kernel.
class SharedMemory {
 public:
  // Throws if two written tensors share elements, or if a tensor of a list overlaps itself. For
  // fake tensors it throws as far as they tell.
  SharedMemory(const std::string& name, const std::vector<Parameter>& parameters,
               c10::ArrayRef<c10::IValue> arguments);

  // Whether a written tensor shares elements with another one, which is read.
  bool is_shared(size_t argument, size_t position) const;

 private:
  struct Member {
    at::Tensor tensor;
    size_t argument;
    bool is_written;
    bool is_shared = false;
  };

  void compare(const std::string& name, const std::vector<Parameter>& parameters, Member& one,
               Member& other);

  std::vector<Member> members_;
  // For each argument, its first member.
  std::vector<size_t> first_;
};

// Each non-tensor argument is eight bytes for the kernel: a number, or the address of larger data.

// The dtype in whose compute type Scalars are passed, and its tensors' names, for messages.
struct Common {
  at::ScalarType dtype = at::ScalarType::Undefined;
  const std::string* names = nullptr;
};

// Whether a kernel reads an argument as it is, and every value is valid.
inline bool is_passed_as_is(const Parameter& parameter) {
  using Kind = Parameter::Kind;
  return parameter.kind == Kind::kFloat || parameter.kind == Kind::kInt ||
         parameter.kind == Kind::kBool;
}

// Refuses an argument, neither a tensor nor None: a text that is none of the choices, a number that
// the common dtype cannot hold, a list of another length than the schema's.
void check_value(const std::string& name, const Parameter& parameter, const c10::IValue& argument,
                 const Common& common);

// Holds the data that the eight bytes point to. Costs nothing without such arguments.
class Values {
 public:
  // Returns the eight bytes of an argument that is not None, or throws if its value is invalid.
  int64_t add(const std::string& name, const Parameter& parameter, const c10::IValue& argument,
              const Common& common) {
    return is_passed_as_is(parameter) ? scalar_bits(argument)
                                      : hold(name, parameter, argument, common);
  }

  // Appends to the signature what a kernel is compiled for besides its tensors: a text, a dtype, or
  // whether an optional argument is given.
  static void sign(const Kernel& kernel, const Parameter& parameter, const c10::IValue& argument,
                   Signature& signature);

  // Records accesses out of the bounds of lists in `outside`.
  void check_bounds(Outside& outside);

  // Returns the name of the list that a view belongs to, or null.
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

  // Forward lists: addresses of elements stay valid.
  std::forward_list<List> lists_;
  std::forward_list<std::array<double, 2>> complex_;
};

}  // namespace foo
