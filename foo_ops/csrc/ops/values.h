// The arguments of a call that are no tensors, and lists of tensors, as a kernel reads them.

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

// Lists of tensors among the arguments of a tile kernel: what they must be, and what shares memory.

// Refuses a list without tensors, or with tensors of several dtypes or numbers of dimensions.
void check_list(const std::string& name, const Parameter& parameter, at::TensorList tensors);

// Which tensors of a call lie where others do. It takes the time of sorting them, where to compare
// each with all others would take longer than the kernel.
class SharedMemory {
 public:
  // Throws for elements that two tensors share which are written, or a tensor of a list itself. Of
  // fake tensors it throws where they tell.
  SharedMemory(const std::string& name, const std::vector<Parameter>& parameters,
               c10::ArrayRef<c10::IValue> arguments);

  // Whether a tensor that is written shares elements with another one, which is read.
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
  // For each argument the first of its members.
  std::vector<size_t> first_;
};

// The arguments of a call that are no tensors, as a kernel reads them: each is eight bytes, a
// number or the address of what is larger.

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
