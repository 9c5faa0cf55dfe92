#include "python/first_call.h"

#include <pybind11/pybind11.h>

#include "launch/registration.h"
#include "python/errors.h"

namespace py = pybind11;

namespace foo {

namespace {

void import_operators() {
  const py::gil_scoped_acquire gil;
  try {
    py::module_::import("foo_ops._operators").attr("load")();
  } catch (py::error_already_set& error) {
    pass_on(error);
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
  TORCH_CHECK(!SecondCall::is_under_way, op.operator_name(), ": foo_ops.ops must not call it");
  import_operators();
  const SecondCall call;
  op.callBoxed(stack);
}

}  // namespace

std::vector<c10::RegistrationHandleRAII> import_at_first_call(const std::string& operator_name,
                                                              c10::DispatchKey key) {
  std::vector<c10::RegistrationHandleRAII> registrations;
  if (!find_operator(operator_name).hasKernelForDispatchKey(key)) {
    registrations.push_back(hold_kernel(
        operator_name, key, c10::KernelFunction::makeFromBoxedFunction<&import_and_call>()));
  }
  return registrations;
}

}  // namespace foo
