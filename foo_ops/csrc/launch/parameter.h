// The arguments of an operator, as a kernel takes them.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <functional>
#include <string>
#include <vector>

#include "launch/kernel_table.h"

namespace foo {

struct Parameter {
  // A kernel gets a seed of each call where its operator has a generator. A Scalar is a number of
  // any type; texts and dtypes are constants in the kernel.
  enum class Kind {
    kTensor,
    kTensors,
    kFloat,
    kInt,
    kBool,
    kScalar,
    kInts,
    kFloats,
    kText,
    kDtype,
    kGenerator
  };
  // The use of a tensor: kOut is an argument `out` of the schema.
  enum class Role { kRead, kInPlace, kOut };

  std::string name;
  Kind kind;
  bool is_optional;
  Role role = Role::kRead;
  // The dtypes that a tensor may have which an elementwise kernel reads in its own dtype, not in
  // the common one, and their name in messages.
  std::vector<at::ScalarType> own_types = {};
  std::string own_types_in_words = {};
  // What a text may be.
  std::vector<std::string> choices = {};
  // How many numbers a list must have, or -1 for any.
  int64_t length = -1;

  bool is_tensor() const { return kind == Kind::kTensor; }
};

// The choices of all parameters.
std::vector<std::string> texts_of(const std::vector<Parameter>& parameters);

// Calls visit(tensor) for an argument that is a tensor, or for each of a list.
template <class Visit>
void for_each_tensor(const c10::IValue& argument, const Visit& visit) {
  if (argument.isTensor()) {
    visit(argument.toTensor());
  } else if (argument.isTensorList()) {
    for (const at::Tensor& tensor : argument.toTensorVector()) visit(tensor);
  }
}

// A scalar as a kernel reads it, in eight bytes: a double, an int64_t, or a bool as one.
int64_t scalar_bits(const c10::IValue& value);

// Refuses tensors that are not all on the device of the first, which is returned. `name` is the
// operator's.
c10::Device common_device(const std::string& name, const std::vector<Parameter>& parameters,
                          c10::ArrayRef<c10::IValue> arguments);

// A seed for a call on a device: an int64_t that is not negative, drawn from a generator, or where
// there is none, from the default one of the device.
int64_t draw_seed(const c10::IValue& generator, c10::Device device);

// Refuses a generator of another device than the tensors have.
void check_generators(const std::string& name, const std::vector<Parameter>& parameters,
                      c10::ArrayRef<c10::IValue> arguments, c10::Device device);

// Throws what is wrong with the contents of an operator's arguments.
using Refusal = std::function<void(c10::ArrayRef<c10::IValue> arguments)>;

// Refuses a result that cannot be cast to the dtype of what it is written to.
void check_can_cast(const std::string& name, const std::string& parameter, at::ScalarType result,
                    const at::Tensor& target);

// The tensors among the arguments, but for those of one.
std::vector<at::Tensor> other_tensors(c10::ArrayRef<c10::IValue> arguments, size_t index);

// Calls visit(index, tensor) for each tensor that is written, but for those of lists.
template <class Visit>
void for_each_written(const std::vector<Parameter>& parameters,
                      c10::ArrayRef<c10::IValue> arguments, Visit visit) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].role != Parameter::Role::kRead && arguments[i].isTensor()) {
      visit(i, arguments[i].toTensor());
    }
  }
}

// Refuses an argument that is written where it shares elements with another one that is.
void check_apart(const std::string& name, const std::vector<Parameter>& parameters,
                 c10::ArrayRef<c10::IValue> arguments, size_t index);

}  // namespace foo
