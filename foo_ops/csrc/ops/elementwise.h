// One launcher for every elementwise operator: an operator names its kernel and its dtypes.

#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace foo {

// For each dtype that the inputs may have, the dtype of the result.
using ResultTypes = std::map<at::ScalarType, at::ScalarType>;

// Give an operator that is already defined its kernels on cpu and foo. The operator's form follows
// from its schema: f(Tensor a, ...) -> Tensor, f_(Tensor(a!) a, ...) -> Tensor(a!), or
// f.out(Tensor a, ..., *, Tensor(a!) out) -> Tensor(a!). Inputs are broadcast and promoted to their
// common dtype. `inputs` names the dtypes that are taken, for the error message.
void register_elementwise(const std::string& operator_name, const std::string& kernel,
                          ResultTypes result_types, const std::string& inputs);

// The result's dtype for an operator registered with register_elementwise, or the error that its
// launcher raises for these inputs and this output (undefined if there is none): for fake kernels.
at::ScalarType elementwise_result_type(const std::string& operator_name, at::TensorList inputs,
                                       const at::Tensor& output);

}  // namespace foo
