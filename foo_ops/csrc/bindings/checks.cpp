#include "bindings/checks.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "launch/overlap.h"
#include "launch/parameter.h"
#include "launch/registration.h"
#include "launch/symbols.h"
#include "ops/attention/arguments.h"
#include "ops/experts/experts.h"
#include "ops/experts/groups.h"
#include "ops/linear/cross_entropy.h"
#include "ops/linear/linear.h"
#include "ops/linear/quantized.h"

namespace py = pybind11;

namespace foo {
namespace {

void bind_linear_checks(py::module_& module) {
  module.def("check_linear", torch::wrap_pybind_function(check_linear));
  module.def("check_linear_activation", torch::wrap_pybind_function(check_linear_activation));
  module.def("check_linear_silu_mul", torch::wrap_pybind_function(check_linear_silu_mul));
  module.def("check_linear_backward", torch::wrap_pybind_function(check_linear_backward));
  module.def("check_linear_int8", torch::wrap_pybind_function(check_linear_int8));
  module.def("check_linear_int4", torch::wrap_pybind_function(check_linear_int4));
  module.def("check_linear_silu_mul_quantized",
             torch::wrap_pybind_function(check_linear_silu_mul_quantized));
  module.def("check_linear_fp8", torch::wrap_pybind_function(check_linear_fp8));
  module.def("check_linear_mxfp4", torch::wrap_pybind_function(check_linear_mxfp4));
  module.def("check_linear_table4", torch::wrap_pybind_function(check_linear_table4));
  module.def("check_linear_cross_entropy", torch::wrap_pybind_function(check_linear_cross_entropy));
  module.def("check_linear_cross_entropy_backward",
             torch::wrap_pybind_function(check_linear_cross_entropy_backward));
  module.def("check_linear_cross_entropy_kept", torch::wrap_pybind_function(check_kept));
  module.def("linear_cross_entropy_kept_sizes", &kept_sizes);
  module.def("check_grouped_linear", torch::wrap_pybind_function(check_grouped_linear));
  module.def("check_grouped_linear_backward",
             torch::wrap_pybind_function(check_grouped_linear_backward));
  module.def("check_moe_experts", torch::wrap_pybind_function(check_moe_experts));
  module.def("check_moe_experts_quantized",
             torch::wrap_pybind_function(check_moe_experts_quantized));
  module.def("check_moe_experts_backward", torch::wrap_pybind_function(check_moe_experts_backward));
}

void bind_attention_checks(py::module_& module) {
  module.def("check_attention",
             torch::wrap_pybind_function(
                 [](const std::string& name, const py::tuple& args, const py::dict& kwargs) {
                   const auto op = find_operator(name);
                   const auto values = torch::jit::createStackForSchema(
                       op.schema(), args, py::kwargs(kwargs), std::nullopt);
                   check_attention({ArgumentPlaces(op.schema()), values});
                 }));
  module.def("check_attention_dropout_mask",
             torch::wrap_pybind_function(
                 [](const at::Tensor& seed, const std::vector<c10::SymInt>& shape, double dropout_p,
                    const std::optional<at::Tensor>& dropout_heads, at::ScalarType dtype) {
                   check_attention_dropout_mask(seed, shape, dropout_p, dropout_heads, dtype);
                 }));
  module.def("check_attention_results", torch::wrap_pybind_function(check_attention_results));
  module.def("check_flex_attention", torch::wrap_pybind_function(check_flex_attention));
  module.def("check_flex_attention_varlen",
             torch::wrap_pybind_function(check_flex_attention_varlen));
  module.def("check_captured_requirements",
             torch::wrap_pybind_function([](const std::string& name,
                                            const std::vector<at::Tensor>& captured,
                                            const std::vector<bool>& requires_grad) {
               check_captured_requirements(name.c_str(), captured, requires_grad);
             }));
}

// Binds checks of operators with `out` arguments.
void bind_checks_of_out(py::module_& module) {
  using Tensor = const at::Tensor&;
  module.def("check_devices",
             torch::wrap_pybind_function(
                 [](const std::string& name, const std::vector<Parameter>& parameters,
                    const std::vector<std::optional<at::Tensor>>& arguments) {
                   const std::vector<c10::IValue> values(arguments.begin(), arguments.end());
                   common_device(name, parameters, values);
                 }));
  module.def("check_out", torch::wrap_pybind_function(
                              [](const std::string& name, const std::string& parameter, Tensor out,
                                 Tensor result, const std::vector<at::Tensor>& others) {
                                check_can_cast(name, parameter, result.scalar_type(), out);
                                const auto sizes = result.sym_sizes();
                                if (!have_sizes(out.sym_sizes(), sizes)) {
                                  check_resizable(name, parameter, out, sizes, others);
                                }
                              }));
}

}  // namespace

void bind_shared_checks(py::module_& module) {
  bind_linear_checks(module);
  bind_attention_checks(module);
  bind_checks_of_out(module);
}

}  // namespace foo
