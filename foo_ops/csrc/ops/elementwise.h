// One launcher for every elementwise operator: an operator names its kernel and its dtypes.

#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ops/parameter.h"
#include "registration.h"

namespace foo {

// For each dtype that the inputs may have, once promoted to a common one, that of each result.
using ResultTypes = std::map<at::ScalarType, std::vector<at::ScalarType>>;

// An operator and its elementwise kernel. Tensors are broadcast and promoted to their common dtype,
// floating-point and other numbers are handed to the kernel as they are. Results are allocated, or
// written to the arguments that the schema writes to.
class Elementwise : public std::enable_shared_from_this<Elementwise> {
 public:
  // `input_types` names the dtypes that are taken, for the message that refuses others.
  Elementwise(const std::string& operator_name, const std::string& kernel,
              std::vector<Parameter> parameters, ResultTypes result_types, std::string input_types);

  // The dtypes of the results, or the error that the launcher raises for these tensors. `outputs`
  // are those that the schema writes to.
  const std::vector<at::ScalarType>& result_types(at::TensorList inputs,
                                                  at::TensorList outputs) const;

  // On a dispatch key, CPU or PrivateUse1.
  c10::RegistrationHandleRAII register_for(c10::DispatchKey key);

  // Replaces the arguments on the stack by the results.
  void launch(torch::jit::Stack& stack);

 private:
  std::string operator_name_;
  std::string name_;
  Kernel kernel_;
  std::vector<Parameter> parameters_;
  ResultTypes result_types_;
  std::string input_types_;
  // "gate and up", for messages.
  std::string input_names_;
  std::vector<std::string> written_names_;
  size_t returns_;
};

}  // namespace foo
