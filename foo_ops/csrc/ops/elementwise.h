// One launcher for every elementwise operator, which names its kernel and its dtypes.

#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "launch/parameter.h"
#include "launch/registration.h"

namespace foo {

// TensorIterator's 2-d loop. `data` and `strides` (in bytes) are in the order outputs, inputs;
// `scalars` are the numbers among the arguments.
using ElementwiseFunction = void(char** data, const int64_t* strides, int64_t size0, int64_t size1,
                                 const int64_t* scalars);

// Maps each allowed common dtype of the inputs to the dtypes of the results.
using ResultTypes = std::map<at::ScalarType, std::vector<at::ScalarType>>;

// An operator and its elementwise kernel. Tensors are broadcast, and promoted to their common dtype
// unless they have their own dtypes; numbers are passed to the kernel as they are. Results are
// allocated, or written to the arguments that the schema writes to.
class Elementwise : public std::enable_shared_from_this<Elementwise> {
 public:
  // `input_types` names the allowed dtypes in the error message for others. `depends_on` gives for
  // each result the argument without which it is missing, or -1; it is empty if no result can be
  // missing.
  Elementwise(const std::string& operator_name, const std::string& kernel,
              std::vector<Parameter> parameters, ResultTypes result_types, std::string input_types,
              std::vector<int64_t> depends_on);

  struct Types {
    at::ScalarType common;
    const std::vector<at::ScalarType>& results;
  };

  // Returns the dtypes of a call, or raises the launcher's error for these tensors.
  Types types_of(c10::ArrayRef<c10::IValue> arguments) const;

  // Throws if arguments that are not tensors have invalid values.
  void check_values(c10::ArrayRef<c10::IValue> arguments, at::ScalarType common) const;

  // Throws as TensorIterator does: a 0-d tensor on cpu goes with any device.
  void check_devices(c10::ArrayRef<c10::IValue> arguments) const;

  // Throws if written tensors do not fit results of this shape, or share elements. Called before
  // anything is written or resized.
  void check_targets(c10::ArrayRef<c10::IValue> arguments, c10::SymIntArrayRef sizes) const;

  // Registers the kernel for a dispatch key, CPU or PrivateUse1.
  c10::RegistrationHandleRAII register_for(c10::DispatchKey key);

  // Replaces the arguments on the stack by the results.
  void launch(torch::jit::Stack& stack);

 private:
  at::ScalarType common_type(c10::ArrayRef<c10::IValue> arguments) const;

  // Throws for tensors that cannot be written. Returns the shape of the results.
  at::DimVector check_written(c10::ArrayRef<c10::IValue> arguments) const;
  void check_overlaps(c10::ArrayRef<c10::IValue> arguments, size_t index) const;
  bool is_missing(c10::ArrayRef<c10::IValue> arguments, size_t result) const;
  bool is_input(c10::ArrayRef<c10::IValue> arguments, size_t index) const;
  bool is_written(c10::ArrayRef<c10::IValue> arguments, size_t index) const;

  std::string operator_name_;
  std::string name_;
  Kernel kernel_;
  std::vector<Parameter> parameters_;
  ResultTypes result_types_;
  std::string input_types_;
  std::vector<int64_t> depends_on_;
  // Number of arguments that are promoted to the common dtype, and "gate and up", for messages.
  size_t promoted_ = 0;
  std::string promoted_names_;
  size_t returns_;
  // Whether there are parameters that are lists of numbers: their indices are checked if kernels
  // check their accesses.
  bool has_lists_;
};

}  // namespace foo
