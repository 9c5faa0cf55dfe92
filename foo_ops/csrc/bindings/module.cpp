// Binds the names of foo_ops._C.

#include <c10/util/StringUtil.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "aten/aten.h"
#include "aten/fallback.h"
#include "bindings/bindings.h"
#include "bindings/checks.h"
#include "bindings/python.h"
#include "device/backend_meta.h"
#include "device/device.h"
#include "device/generator.h"
#include "device/guard.h"
#include "device/hooks.h"
#include "device/host_allocator.h"
#include "launch/autograd.h"
#include "launch/kernel_table.h"
#include "launch/memory.h"
#include "launch/overlap.h"
#include "launch/parameter.h"
#include "launch/registration.h"
#include "ops/elementwise.h"
#include "ops/linear/torch_product.h"
#include "ops/tile.h"
#include "ops/values.h"
#include "ops/view.h"

namespace py = pybind11;

namespace {

// Imports Numba, at a kernel's first use and not before.
void* resolve_kernel(const std::string& kernel, const std::string& signature) {
  const py::gil_scoped_acquire gil;
  try {
    const py::object address =
        py::module_::import("foo_ops._operators").attr("resolve")(kernel, signature);
    return reinterpret_cast<void*>(address.cast<uintptr_t>());
  } catch (py::error_already_set& error) {
    const py::object refusal =
        py::module_::import("foo_ops.kernels.compiler.kernel").attr("KernelError");
    if (error.matches(refusal)) {
      const std::string message = py::str(error.value());
      TORCH_CHECK_TYPE(!error.matches(PyExc_TypeError), message);
      TORCH_CHECK_VALUE(!error.matches(PyExc_ValueError), message);
      TORCH_CHECK(false, message);
    }
    // Other exceptions, such as KeyboardInterrupt, occurred during compilation.
    foo::pass_on(error);
  }
}

// Rethrows an exception of a kernel that Python interprets.
void rethrow_raised() {
  const py::gil_scoped_acquire gil;
  try {
    py::module_::import("foo_ops.kernels.compiler.interpret").attr("reraise")();
  } catch (py::error_already_set& error) {
    foo::pass_on(error);
  }
}

void import_operators() {
  const py::gil_scoped_acquire gil;
  try {
    py::module_::import("foo_ops._operators").attr("load")();
  } catch (py::error_already_set& error) {
    foo::pass_on(error);
  }
}

class SecondCall {
 public:
  SecondCall() { is_under_way = true; }
  ~SecondCall() { is_under_way = false; }
  SecondCall(const SecondCall&) = delete;
  SecondCall& operator=(const SecondCall&) = delete;

  static thread_local bool is_under_way;
};

thread_local bool SecondCall::is_under_way = false;

void import_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // Otherwise the recursion would be endless.
  TORCH_CHECK(!SecondCall::is_under_way, op.operator_name(),
              ": must not be called while foo_ops.ops is imported");
  import_operators();
  const SecondCall call;
  op.callBoxed(stack);
}

// Makes calls of the operator import foo_ops.ops, which registers its kernels, and then start
// again; this includes calls from C++, which look nothing up in Python. Lasts as long as the
// handles. An operator that has a kernel for the key keeps it.
std::vector<c10::RegistrationHandleRAII> import_at_first_call(const std::string& operator_name,
                                                              c10::DispatchKey key) {
  std::vector<c10::RegistrationHandleRAII> registrations;
  if (!foo::find_operator(operator_name).hasKernelForDispatchKey(key)) {
    registrations.push_back(foo::hold_kernel(
        operator_name, key, c10::KernelFunction::makeFromBoxedFunction<&import_and_call>()));
  }
  return registrations;
}

// Registration handle with a destroy() method, as torch.library.Library keeps them.
class Registration {
 public:
  explicit Registration(c10::RegistrationHandleRAII handle) {
    handles_->push_back(std::move(handle));
  }
  explicit Registration(std::vector<c10::RegistrationHandleRAII> handles)
      : handles_(new std::vector(std::move(handles))) {}
  void destroy() { handles_->clear(); }

 private:
  // Not destroyed with this object: at exit the dispatcher may be gone already.
  std::vector<c10::RegistrationHandleRAII>* handles_ =
      new std::vector<c10::RegistrationHandleRAII>();
};

void bind_kernels(py::module_& module) {
  using foo::Elementwise;
  using foo::Parameter;
  py::class_<Registration>(module, "Registration").def("destroy", &Registration::destroy);
  py::class_<Parameter>(module, "Parameter")
      .def(py::init(&foo::make_parameter), py::arg("name"), py::arg("kind"), py::arg("is_optional"),
           py::arg("role"), py::arg("choices"), py::arg("length"),
           py::arg("own_types") = std::vector<at::ScalarType>(),
           py::arg("own_types_in_words") = "");
  py::class_<Elementwise, std::shared_ptr<Elementwise>>(module, "Elementwise")
      .def(py::init<const std::string&, const std::string&, std::vector<Parameter>,
                    foo::ResultTypes, std::string, std::vector<int64_t>>(),
           py::arg("operator_name"), py::arg("kernel"), py::arg("parameters"),
           py::arg("result_types"), py::arg("input_types"), py::arg("depends_on"))
      .def("result_types",
           torch::wrap_pybind_function(
               [](const Elementwise& elementwise, const py::list& arguments) {
                 const auto values = foo::values_of(arguments);
                 elementwise.check_devices(values);
                 const auto types = elementwise.types_of(values);
                 elementwise.check_values(values, types.common);
                 return types.results;
               }),
           py::arg("arguments"))
      .def("check_targets",
           torch::wrap_pybind_function([](const Elementwise& elementwise,
                                          const std::vector<std::optional<at::Tensor>>& arguments,
                                          const std::vector<c10::SymInt>& sizes) {
             const std::vector<c10::IValue> values(arguments.begin(), arguments.end());
             elementwise.check_targets(values, sizes);
           }),
           py::arg("arguments"), py::arg("sizes"))
      .def("register_for", [](Elementwise& elementwise, const std::string& key) {
        return Registration(elementwise.register_for(c10::parseDispatchKey(key)));
      });
  module.def("check_tile_values",
             torch::wrap_pybind_function([](const std::string& name,
                                            const std::vector<Parameter>& parameters,
                                            const py::list& arguments) {
               foo::check_tile_values(name, parameters, foo::values_of(arguments));
             }));
  module.def("check_written_memory",
             torch::wrap_pybind_function([](const std::string& name,
                                            const std::vector<Parameter>& parameters,
                                            const py::list& arguments) {
               const foo::SharedMemory memory(name, parameters, foo::values_of(arguments));
             }));
  module.def("register_tile",
             [](const std::string& operator_name, const std::string& key, const std::string& kernel,
                std::vector<Parameter> parameters, std::vector<std::string> names,
                bool contiguous_rows, bool repeats_written, bool finishes, bool refuses_late,
                const std::vector<std::tuple<int64_t, int64_t, bool>>& scratch,
                std::vector<bool> checks, py::object refuse) {
               std::vector<foo::ScratchOption> options;
               for (const auto& [like, dimensions, is_per_call] : scratch) {
                 options.push_back({like, dimensions, is_per_call});
               }
               foo::Refusal refusal = foo::refusal(std::move(refuse), parameters);
               return Registration(foo::register_tile(
                   operator_name, c10::parseDispatchKey(key), kernel, std::move(parameters),
                   {std::move(names), contiguous_rows, repeats_written, finishes, refuses_late,
                    std::move(options), std::move(checks), std::move(refusal)}));
             });
  module.def("register_tensor_numbers", [](const std::string& name, const std::string& key,
                                           const std::string& of) {
    return Registration(foo::register_tensor_numbers(name, c10::parseDispatchKey(key), of));
  });
  module.def("ask_for_bounds_checks", &foo::ask_for_bounds_checks);
  module.def("end_bounds_checks", &foo::end_bounds_checks);
  module.def("guard_memory", &foo::device::guard_memory);
  module.def("end_guarded_memory", &foo::device::end_guarded_memory);
  module.def("result_memory", [] {
    const auto [waiting_bytes, most_waiting_bytes] = foo::result_memory_figures();
    return py::make_tuple(waiting_bytes, most_waiting_bytes);
  });
  module.def("release_result_memory", &foo::release_result_memory);
}

void bind_autograd(py::module_& module) {
  using foo::Tangents;
  py::enum_<Tangents>(module, "Tangents")
      .value("partial_derivatives", Tangents::kPartialDerivatives)
      .value("composite", Tangents::kComposite)
      .value("not_implemented", Tangents::kNotImplemented);
  const py::arg name("operator_name");
  module.def(
      "register_formula",
      [](const std::string& name, const py::object& formula, Tangents tangents) {
        return Registration(
            foo::register_formula(name, foo::make_python_formula(name, formula), tangents));
      },
      name, py::arg("formula"), py::arg("tangents"));
  module.def("register_backward_operator",
             torch::wrap_pybind_function(
                 [](const std::string& name, const std::string& backward, Tangents tangents) {
                   return Registration(foo::register_backward_operator(name, backward, tangents));
                 }),
             name, py::arg("backward_name"), py::arg("tangents"));
  module.def(
      "refuse_to_differentiate",
      [](const std::string& name, const std::string& message) {
        return Registration(foo::refuse_to_differentiate(name, message));
      },
      name, py::arg("message"));
  module.def(
      "register_variant_autograd",
      [](const std::string& name) { return Registration(foo::register_variant_autograd(name)); },
      name);
  module.def("replace_flash_attention_of_cpu",
             [] { return Registration(foo::aten::replace_flash_attention_of_cpu()); });
  module.def("resolve_math_bits",
             [](const std::string& name) { return Registration(foo::resolve_math_bits(name)); });
  module.def("refuse_nested_tensors", [](const std::string& name) {
    return Registration(foo::refuse_nested_tensors(name));
  });
  module.def(
      "count_versions",
      [](const std::string& name) { return Registration(foo::count_versions(name)); }, name);
}

template <size_t size>
size_t index_of(const std::array<std::string_view, size>& names, std::string_view name) {
  const auto* const found = std::find(names.begin(), names.end(), name);
  TORCH_CHECK_VALUE(found != names.end(), "must be one of ", c10::Join(", ", names), ", got ",
                    name);
  return found - names.begin();
}

// Binds the table of products that PyTorch computes, for tests and for foo_ops.info.
void bind_product_table(py::module_& module) {
  using foo::Vendor;
  py::enum_<Vendor>(module, "Vendor")
      .value("amd", Vendor::kAmd)
      .value("intel", Vendor::kIntel)
      .value("other", Vendor::kOther);
  module.def(
      "product_family",
      [](Vendor vendor, bool avx2, bool avx512, bool bfloat16_dot, bool matrix_unit) {
        return foo::name_of(foo::family_of({vendor, avx2, avx512, bfloat16_dot, matrix_unit}));
      },
      py::arg("vendor"), py::kw_only(), py::arg("avx2") = false, py::arg("avx512") = false,
      py::arg("bfloat16_dot") = false, py::arg("matrix_unit") = false);
  module.def(
      "is_quicker_by_torch",
      [](const std::string& family, at::ScalarType dtype, const std::string& form, int64_t rows,
         double work) {
        return foo::is_quicker_by_torch(foo::Family(index_of(foo::kFamilyNames, family)), dtype,
                                        foo::Form(index_of(foo::kFormNames, form)), {rows, work});
      },
      py::arg("family"), py::arg("dtype"), py::arg("form"), py::kw_only(), py::arg("rows"),
      py::arg("work"));
  module.attr("PRODUCT_FAMILIES") = py::cast(foo::kFamilyNames);
  module.attr("PRODUCT_FORMS") = py::cast(foo::kFormNames);
  module.def(
      "set_tuned_products",
      [](const std::vector<std::tuple<at::ScalarType, std::string, int64_t, int64_t>>& all) {
        std::vector<foo::TunedProducts> products;
        for (const auto& [dtype, form, least_rows, most_rows] : all) {
          products.push_back(
              {dtype, foo::Form(index_of(foo::kFormNames, form)), least_rows, most_rows});
        }
        foo::set_tuned_products(products);
      },
      py::arg("products"));
  module.def("has_no_products_of_torch", &foo::has_no_products_of_torch);
  module.def("torch_products", [] { return foo::name_of(foo::products_family()); });
  module.def("set_torch_products", torch::wrap_pybind_function(foo::set_products_family),
             py::arg("name"));
}

void bind_operators(py::module_& module) {
  foo::set_resolver(resolve_kernel);
  module.def("interpret_kernels", [] { foo::set_rethrower(rethrow_raised); });
  module.def("import_at_first_call", [](const std::string& name, const std::string& key) {
    return Registration(import_at_first_call(name, c10::parseDispatchKey(key)));
  });
  foo::bind_agreement(module);
  foo::bind_plans(module);
  bind_kernels(module);
  foo::bind_shared_checks(module);
  bind_product_table(module);
  bind_autograd(module);
}

// `graph` is a Python function that calls C++.
foo::aten::Tensors run_compiled_graph(const at::Device& device, const py::function& graph,
                                      const foo::aten::Tensors& inputs,
                                      const std::string& devices) {
  return foo::aten::run_compiled_graph(device, inputs, devices, [&](foo::aten::Tensors host) {
    return graph(std::move(host)).cast<foo::aten::Tensors>();
  });
}

// Binds functions that torch's own Python functions for accelerators lack.
void bind_device(py::module_& module) {
  using namespace foo::device;
  auto device = module.def_submodule("device", "Device foo.");
  device.def("device_count", [] { return int{device_count()}; });
  device.def("set_device", &set_current_device);
  device.def("check_device_index", &check_device_index);
  device.def("default_generator", &default_generator);
  device.def("initialize", &initialize);
  device.def("is_initialized", &is_initialized);
  device.def("is_in_bad_fork", &is_in_bad_fork);
  device.def("wait_for_autograd_threads", &wait_for_autograd_threads,
             py::call_guard<py::gil_scoped_release>());
  device.def("set_backend_meta", torch::wrap_pybind_function(&set_backend_meta));
  device.def("get_backend_meta", torch::wrap_pybind_function(&get_backend_meta));
  device.def("operator_counts", &foo::operator_counts);
  device.def("instead_of", [](const std::string& name) {
    return foo::aten::instead_of(foo::find_operator(name).operator_name());
  });
  device.def("reset_operator_counts", &foo::reset_operator_counts);
  device.def("run_compiled_graph", &run_compiled_graph);
  device.def("has_own_products", &foo::aten::has_own_products);
  device.def("set_own_products", &foo::aten::set_own_products);
  foo::bind_memory(device);
  foo::graphs::bind_graphs(device);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The compiled companion of foo_ops.";
  bind_operators(module);
  bind_device(module);
  foo::bind_fingerprints(module);
  foo::graphs::bind_programs(module);
  foo::sanitizer::bind_sanitizer(module);
  const auto operators = foo::all_operators();
  foo::aten::register_wider_kernels(operators);
  foo::aten::register_half_transforms(operators);
  foo::aten::register_host_kernels(operators);
  foo::aten::register_recurrent_layers();
  foo::aten::register_collectives(operators);
}
