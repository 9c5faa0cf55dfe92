// Binds the sanitizer for foo_ops/sanitizer.

#include "sanitizer/sanitizer.h"

#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "bindings/python.h"
#include "device/stream.h"

namespace py = pybind11;

namespace foo::sanitizer {
namespace {

const char* name_of(Deed deed) {
  switch (deed) {
    case Deed::kRead:
      return "read";
    case Deed::kWrite:
      return "write";
    case Deed::kAllocation:
      return "allocation";
    case Deed::kFree:
      return "free";
  }
  return "";
}

// Lists frames from the outermost call to the innermost: file, line, function.
py::list describe_stack(const Stack& stack) {
  py::list frames;
  if (stack == nullptr) return frames;
  const torch::SymbolizedTracebacks found = torch::symbolize({stack.get()});
  const std::vector<uint64_t>& indices = found.tracebacks[0];
  for (auto index = indices.rbegin(); index != indices.rend(); ++index) {
    const auto& frame = found.all_frames[*index];
    frames.append(py::make_tuple(frame.filename, frame.lineno, frame.funcname));
  }
  return frames;
}

py::dict describe_party(const Party& party) {
  py::dict description;
  description["deed"] = name_of(party.deed);
  description["operator"] = party.operator_name;
  description["stream"] = party.stream ? py::cast(party.stream->id()) : py::none();
  description["stack"] = describe_stack(party.stack);
  return description;
}

py::object describe_party(const std::optional<Party>& party) {
  return party ? py::object(describe_party(*party)) : py::none();
}

py::dict describe_finding(const Finding& finding) {
  const Description& tensor = finding.tensor;
  py::dict description;
  description["kind"] = finding.kind;
  description["shape"] = py::tuple(py::cast(tensor.shape));
  description["dtype"] = tensor.dtype ? py::cast(*tensor.dtype) : py::none();
  description["device"] = tensor.device;
  description["address"] = tensor.address;
  description["nbytes"] = tensor.bytes;
  description["now"] = describe_party(finding.now);
  description["before"] = describe_party(finding.before);
  description["user"] = describe_party(finding.user);
  return description;
}

const char* name_of(Consequence consequence) {
  switch (consequence) {
    case Consequence::kRaise:
      return "raise";
    case Consequence::kRaiseLater:
      return "raise later";
    case Consequence::kEnd:
      return "end";
  }
  return "";
}

// Python itself makes the exception, without arguments, when it next runs in this thread.
void raise_later(const py::handle& type) {
  PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), type.ptr());
}

// `function` gets the finding and its consequence. It raises, or returns the type of an exception
// to be raised later, or None. No exception may pass through code that cannot be stopped.
Report report_to(py::function function) {
  auto* const held = new py::function(std::move(function));  // Leaked: Python may be gone first.
  return [held](const Finding& finding, Consequence consequence) {
    const py::gil_scoped_acquire gil;
    try {
      const py::object raised = (*held)(describe_finding(finding), name_of(consequence));
      if (!raised.is_none()) raise_later(raised);
    } catch (py::error_already_set& error) {
      if (consequence == Consequence::kRaise) pass_on(error);
      raise_later(error.type());
    }
  };
}

void start(py::function report) {
  sanitizer().start(report_to(std::move(report)));
  device::sanitizer_observer.store(&sanitizer(), std::memory_order_release);
  observe_operators();
}

void stop() {
  stop_observing_operators();
  device::sanitizer_observer.store(nullptr, std::memory_order_release);
  sanitizer().stop();
}

// Runs a kernel of a compiled graph. `written` tells for each argument whether it is written, or
// None if it is not a tensor.
py::object call_kernel(const std::string& name, const std::vector<std::optional<bool>>& written,
                       const py::function& kernel, const py::args& arguments) {
  OperatorUses uses;
  uses.name = name;
  std::vector<c10::IValue> tensors;
  for (size_t i = 0; i < written.size(); ++i) {
    if (!written[i].has_value()) continue;
    uses.arguments.push_back({Reads::kNothing, !*written[i], *written[i]});
    tensors.emplace_back(arguments[i].cast<at::Tensor>());
  }
  py::object result;
  sanitizer().call(
      uses, tensors, [&] { result = kernel(*arguments); },
      []() -> c10::ArrayRef<c10::IValue> { return {}; });
  return result;
}

}  // namespace

void bind_sanitizer(py::module_& module) {
  auto bound = module.def_submodule("sanitizer", "What foo_ops.sanitizer is made of.");
  bound.def("start", &start);
  bound.def("stop", &stop);
  bound.def("call_kernel", torch::wrap_pybind_function(&call_kernel));
  bound.def("figures", [] { return sanitizer().figures(); });
  using device::SyncDebugMode;
  bound.def("set_sync_debug_mode",
            [](int mode) { device::sync_debug_mode.store(static_cast<SyncDebugMode>(mode)); });
  bound.def("get_sync_debug_mode", [] { return static_cast<int>(device::sync_debug_mode.load()); });
}

}  // namespace foo::sanitizer
