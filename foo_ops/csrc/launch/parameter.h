// Arguments of an operator as a kernel takes them.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <functional>
#include <string>
#include <vector>

#include "launch/kernel_table.h"

namespace foo {

struct Parameter {
  // For a generator the kernel gets a seed per call. A Scalar is a number of any type; texts and
  // dtypes are constants in the kernel.
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
  // Dtypes allowed for a tensor that an elementwise kernel reads in the tensor's own dtype instead
  // of the common one, and their name in messages.
  std::vector<at::ScalarType> own_types = {};
  std::string own_types_in_words = {};
  // Allowed texts.
  std::vector<std::string> choices = {};
  // Required length of a list, or -1 for any.
  int64_t length = -1;

  bool is_tensor() const { return kind == Kind::kTensor; }
};

// Returns the choices of all parameters.
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

// Returns a scalar's eight bytes as a kernel reads them: a double, an int64_t, or a bool as one.
int64_t scalar_bits(const c10::IValue& value);

// Returns the device of the first tensor, and refuses tensors on another. `name` is the operator's.
c10::Device common_device(const std::string& name, const std::vector<Parameter>& parameters,
                          c10::ArrayRef<c10::IValue> arguments);

// Draws a seed for a call on a device: a nonnegative int64_t from the generator, or from the
// device's default one if there is none.
int64_t draw_seed(const c10::IValue& generator, c10::Device device);

// Refuses a generator of another device than the tensors'.
void check_generators(const std::string& name, const std::vector<Parameter>& parameters,
                      c10::ArrayRef<c10::IValue> arguments, c10::Device device);

// Throws if the contents of an operator's arguments are wrong.
using Refusal = std::function<void(c10::ArrayRef<c10::IValue> arguments)>;

// Refuses a result that cannot be cast to the dtype of the target.
void check_can_cast(const std::string& name, const std::string& parameter, at::ScalarType result,
                    const at::Tensor& target);

// Returns the tensors of all arguments except the one at `index`.
std::vector<at::Tensor> other_tensors(c10::ArrayRef<c10::IValue> arguments, size_t index);

// Calls visit(index, tensor) for each written tensor, except those in lists.
template <class Visit>
void for_each_written(const std::vector<Parameter>& parameters,
                      c10::ArrayRef<c10::IValue> arguments, Visit visit) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].role != Parameter::Role::kRead && arguments[i].isTensor()) {
      visit(i, arguments[i].toTensor());
    }
  }
}

// Refuses a written argument that shares elements with another written one.
void check_apart(const std::string& name, const std::vector<Parameter>& parameters,
                 c10::ArrayRef<c10::IValue> arguments, size_t index);

}  // namespace foo
