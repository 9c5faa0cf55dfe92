// Binds functions for graphs that torch's own classes lack.

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/python.h"
#include "device/device.h"
#include "device/stream.h"
#include "graphs/recorder.h"

namespace py = pybind11;

namespace foo::graphs {
namespace {

bool is_current_stream_capturing() {
  if (!recorder().is_capturing()) return false;
  return recorder().capture_of(device::current_stream(device::current_device())) != nullptr;
}

// A kernel of a compiled graph.
class KernelStep final : public Step {
 public:
  KernelStep(std::string name, py::object kernel, py::tuple arguments)
      : name_(std::move(name)), kernel_(std::move(kernel)), arguments_(std::move(arguments)) {}
  ~KernelStep() override {
    const py::gil_scoped_acquire gil;
    kernel_ = py::object();
    arguments_ = py::tuple();
  }

  void replay() const override {
    const py::gil_scoped_acquire gil;
    try {
      kernel_(*arguments_);
    } catch (py::error_already_set& error) {
      pass_on(error);
    }
  }

  std::string describe() const override { return name_; }

 private:
  const std::string name_;
  py::object kernel_;
  py::tuple arguments_;
};

// `written` tells for each argument whether it is written, or None if it is not a tensor.
py::object call_kernel(const std::string& name, const std::vector<std::optional<bool>>& written,
                       const py::function& kernel, const py::args& arguments) {
  std::vector<c10::IValue> tensors;
  for (size_t i = 0; i < written.size(); ++i) {
    if (written[i].has_value()) tensors.emplace_back(arguments[i].cast<at::Tensor>());
  }
  const auto capture = recorder().capture_of(tensors);
  if (capture == nullptr) return kernel(*arguments);
  py::tuple borrowed(arguments.size());
  for (size_t i = 0; i < written.size(); ++i) {
    borrowed[i] = arguments[i];
    if (!written[i].has_value()) continue;
    borrowed[i] = capture->borrow(name, arguments[i].cast<at::Tensor>(), *written[i]);
  }
  py::object result;
  {
    const aten::InCapturedOperator scope;
    result = kernel(*arguments);
  }
  capture->add(std::make_unique<KernelStep>(name, kernel, std::move(borrowed)));
  return result;
}

}  // namespace

void bind_graphs(py::module_& module) {
  module.def("is_current_stream_capturing", &is_current_stream_capturing);
  module.def("capture_kernel", torch::wrap_pybind_function(&call_kernel));
  module.def("set_capture_listener", [](py::function listener) {
    auto* const held = new py::function(std::move(listener));  // Leaked: Python may be gone first.
    recorder().set_listener([held](bool is_capturing) {
      const py::gil_scoped_acquire gil;
      (*held)(is_capturing);
    });
  });
}

}  // namespace foo::graphs
