// Binds programs of recorded calls, and snapshots of the Python objects that these depend on.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "graphs/generation.h"
#include "graphs/program.h"
#include "graphs/sampling.h"

namespace py = pybind11;

namespace foo::graphs {
namespace {

bool has_parts_that_change(const py::handle& value) {
  if (py::isinstance<Register>(value) || py::isinstance<Number>(value)) return true;
  if (!py::isinstance<py::list>(value) && !py::isinstance<py::tuple>(value)) return false;
  for (const py::handle each : py::reinterpret_borrow<py::sequence>(value)) {
    if (has_parts_that_change(each)) return true;
  }
  return false;
}

c10::TypePtr without_optional(const c10::TypePtr& type) {
  const auto optional = type->cast<c10::OptionalType>();
  return optional == nullptr ? type : optional->getElementType();
}

// Lists of symbolic integers hold plain ones.
c10::TypePtr element_type_of(const c10::TypePtr& list) {
  const c10::TypePtr type = list->expectRef<c10::ListType>().getElementType();
  return type->kind() == c10::TypeKind::SymIntType ? c10::IntType::get() : type;
}

Argument read_argument(const py::handle& value, const c10::TypePtr& type) {
  const c10::TypePtr inner = without_optional(type);
  if (py::isinstance<Register>(value)) return {value.cast<Register>(), nullptr};
  if (py::isinstance<Number>(value)) {
    const auto number = value.cast<Number>();
    if (inner->kind() == c10::TypeKind::TensorType) return {NumberAsTensor{number}, nullptr};
    return {number, nullptr};
  }
  if (has_parts_that_change(value)) {
    const c10::TypePtr element = element_type_of(inner);
    std::vector<Argument> elements;
    for (const py::handle each : py::reinterpret_borrow<py::sequence>(value)) {
      elements.push_back(read_argument(each, element));
    }
    return {std::move(elements), element};
  }
  const torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
  return {torch::jit::toIValue(value, type), nullptr};
}

std::vector<Argument> read_arguments(const c10::FunctionSchema& schema, const py::tuple& given,
                                     const py::dict& named) {
  std::vector<Argument> arguments;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& parameter = schema.arguments()[i];
    if (i < given.size()) {
      arguments.push_back(read_argument(given[i], parameter.real_type()));
    } else if (named.contains(parameter.name())) {
      arguments.push_back(read_argument(named[parameter.name().c_str()], parameter.real_type()));
    } else {
      arguments.push_back({parameter.default_value().value_or(c10::IValue()), nullptr});
    }
  }
  return arguments;
}

// None, a register, a list of indices of registers, or any other value that is expected.
Result read_result(const py::handle& value, const c10::TypePtr& type) {
  if (value.is_none()) return std::monostate();
  if (py::isinstance<Register>(value)) return value.cast<Register>();
  if (py::isinstance<py::list>(value)) return value.cast<std::vector<int64_t>>();
  return Guard{read_argument(value, type)};
}

// A function call, or a view.
Instruction read_instruction(const py::tuple& given) {
  auto last_uses = given[0].cast<std::vector<int64_t>>();
  if (given.size() == 7) {
    using Numbers = std::vector<Number>;
    return {View{given[1].cast<Register>(), given[2].cast<Numbers>(), given[3].cast<Register>(),
                 given[4].cast<Numbers>(), given[5].cast<Numbers>(), given[6].cast<Number>()},
            std::move(last_uses)};
  }
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      given[1].cast<std::string>().c_str(), given[2].cast<std::string>().c_str());
  const auto [positional, named, results] =
      given[3].cast<std::tuple<py::tuple, py::dict, py::tuple>>();
  OperatorCall call{op, read_arguments(op.schema(), positional, named), {}};
  for (size_t i = 0; i < results.size(); ++i) {
    call.results.push_back(read_result(results[i], op.schema().returns()[i].real_type()));
  }
  return {std::move(call), std::move(last_uses)};
}

std::unique_ptr<Program> make_program(int64_t register_count, std::vector<int64_t> inputs,
                                      std::vector<int64_t> outputs,
                                      std::vector<std::pair<int64_t, at::Tensor>> constants,
                                      const std::vector<py::tuple>& instructions) {
  std::vector<Instruction> read;
  read.reserve(instructions.size());
  for (const py::tuple& each : instructions) read.push_back(read_instruction(each));
  return std::make_unique<Program>(register_count, std::move(inputs), std::move(outputs),
                                   std::move(constants), std::move(read));
}

// The version of a dict, which changes when an entry does: without reading the entries. From Python
// 3.12 on there is none.
uint64_t version_of(PyObject* content) {
#if PY_VERSION_HEX < 0x030C0000
  if (PyDict_Check(content)) return reinterpret_cast<PyDictObject*>(content)->ma_version_tag;
#endif
  return 0;
}

// The values of dicts, lists and classes, and the versions of tensors, at one time. Tensors among
// the values are held weakly: caches count who holds their memory.
class Snapshot {
 public:
  Snapshot(py::list containers, std::vector<at::Tensor> tensors)
      : containers_(std::move(containers)), tensors_(std::move(tensors)) {
    for (const py::handle each : containers_) {
      PyObject* const content = PyType_Check(each.ptr())
                                    ? reinterpret_cast<PyTypeObject*>(each.ptr())->tp_dict
                                    : each.ptr();
      TORCH_CHECK_TYPE(PyDict_Check(content) || PyList_Check(content),
                       "Snapshot: containers must be dicts, lists and classes, got ",
                       Py_TYPE(each.ptr())->tp_name);
      parts_.push_back({content, 0, 0});
    }
    take();
  }

  // Notes the present values; those that are noted already stay.
  void take() {
    tensor_versions_.clear();
    for (const at::Tensor& each : tensors_) tensor_versions_.push_back(version_of_tensor(each));
    size_t next = 0;
    for (Part& part : parts_) {
      part.version = version_of(part.content);
      part.begin = next;
      each_value(part.content, [&](PyObject* value) {
        if (next == values_.size()) values_.emplace_back();
        py::object& noted = values_[next++];
        if (!noted || !is_noted(noted.ptr(), value)) noted = note_of(value);
        return true;
      });
    }
    values_.resize(next);
  }

  bool holds() {
    for (size_t i = 0; i < parts_.size(); ++i) {
      // A model has thousands, and its weights have pushed them out of the first caches.
      if (i + kAhead < parts_.size()) __builtin_prefetch(parts_[i + kAhead].content);
      const uint64_t version = version_of(parts_[i].content);
      if (version != 0 && version == parts_[i].version) continue;
      if (!has_noted_values(i)) return false;
      // An entry has come and gone: the next look finds it unchanged.
      parts_[i].version = version;
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (version_of_tensor(tensors_[i]) != tensor_versions_[i]) return false;
    }
    return true;
  }

  // For Python's garbage collector.
  int visit(visitproc visit, void* arg) const {
    Py_VISIT(containers_.ptr());
    for (const py::object& each : values_) Py_VISIT(each.ptr());
    return 0;
  }
  void clear() {
    parts_.clear();
    values_.clear();
    containers_ = py::list();
  }

 private:
  // A dict or list, its version, and the place of its first value.
  struct Part {
    PyObject* content;
    uint64_t version;
    size_t begin;
  };
  static constexpr size_t kAhead = 16;

  bool has_noted_values(size_t part) const {
    size_t next = parts_[part].begin;
    const size_t end = part + 1 < parts_.size() ? parts_[part + 1].begin : values_.size();
    const bool is_same = each_value(parts_[part].content, [&](PyObject* value) {
      return next < end && is_noted(values_[next++].ptr(), value);
    });
    return is_same && next == end;
  }

  static py::object note_of(PyObject* value) {
    if (THPVariable_Check(value)) return py::weakref(value);
    return py::reinterpret_borrow<py::object>(value);
  }

  static bool is_noted(PyObject* noted, PyObject* value) {
    return noted == value || (PyWeakref_CheckRef(noted) && PyWeakref_GetObject(noted) == value);
  }

  static int64_t version_of_tensor(const at::Tensor& tensor) {
    return tensor.is_inference() ? -1 : int64_t{tensor._version()};
  }

  // Stops at the first value for which `function` returns false.
  template <typename Function>
  static bool each_value(PyObject* content, const Function& function) {
    if (PyDict_Check(content)) {
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      Py_ssize_t place = 0;
      while (PyDict_Next(content, &place, &key, &value) != 0) {
        if (!function(value)) return false;
      }
      return true;
    }
    const Py_ssize_t size = PyList_GET_SIZE(content);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!function(PyList_GET_ITEM(content, i))) return false;
    }
    return true;
  }

  py::list containers_;
  std::vector<at::Tensor> tensors_;
  std::vector<Part> parts_;
  std::vector<py::object> values_;
  std::vector<int64_t> tensor_versions_;
};

// A model holds a snapshot of itself, so the collector has to see through it.
void take_part_in_collection(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    // The collector may come between allocation and construction.
    auto held = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
    if (!held.holder_constructed()) return 0;
    return py::handle(self).cast<const Snapshot*>()->visit(visit, arg);
  };
  type.tp_clear = [](PyObject* self) {
    py::handle(self).cast<Snapshot*>()->clear();
    return 0;
  };
}

// Values of dicts and lists that a recorded call changes: outputs of its program, and integers.
class Changes {
 public:
  // The place of a value, and the number of an output or the integer at each position.
  template <class Value>
  using Change = std::tuple<py::object, py::object, Value>;

  Changes(std::vector<Change<size_t>> outputs, std::vector<Change<Number>> integers)
      : outputs_(std::move(outputs)), integers_(std::move(integers)) {}

  void write(const py::list& outputs, int64_t position) const {
    for (const auto& [owner, key, number] : outputs_) owner[key] = outputs[number];
    for (const auto& [owner, key, number] : integers_) owner[key] = py::int_(number.at(position));
  }

 private:
  std::vector<Change<size_t>> outputs_;
  std::vector<Change<Number>> integers_;
};

// A key that interrupts has to do so within many tokens, too. Other threads may hold the GIL for 5
// ms, which not every token is to wait for.
constexpr auto kBetweenSignals = std::chrono::milliseconds(50);

void run_loop_with_signals(const Program& program, const Loop& loop, int64_t position,
                           std::vector<at::Tensor> inputs, Sequences& sequences, int64_t most,
                           Progress& progress) {
  using Clock = std::chrono::steady_clock;
  auto last = Clock::now();
  const auto check_signals = [&] {
    const auto now = Clock::now();
    if (now - last < kBetweenSignals) return;
    last = now;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  run_loop(program, loop, position, std::move(inputs), sequences, most, check_signals, progress);
}

// Whether anything beside results may depend on calls of operators, or be told of them.
bool are_calls_seen() {
  return at::GradMode::is_enabled() || torch::jit::tracer::isTracing() ||
         c10::impl::TorchDispatchModeTLS::stack_len() != 0 ||
         at::impl::PythonTorchFunctionTLS::stack_len() != 0 ||
         at::autocast::is_autocast_enabled(at::kCPU) ||
         at::autocast::is_autocast_enabled(at::kPrivateUse1) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

}  // namespace

void bind_programs(py::module_& module) {
  module.def("are_calls_seen", &are_calls_seen);
  py::class_<Sampling>(module, "Sampling")
      .def(py::init<>())
      .def_readwrite("is_greedy", &Sampling::is_greedy)
      .def_readwrite("repetition_penalty", &Sampling::repetition_penalty)
      .def_readwrite("least_length", &Sampling::least_length)
      .def_readwrite("temperature", &Sampling::temperature)
      .def_readwrite("top_k", &Sampling::top_k)
      .def_readwrite("top_p", &Sampling::top_p)
      .def_readwrite("least", &Sampling::least)
      .def_readwrite("min_p", &Sampling::min_p);
  py::class_<Sequences>(module, "Sequences")
      .def(py::init(
               torch::wrap_pybind_function([](const at::Tensor& prompt, std::vector<int64_t> ends,
                                              int64_t padding, const Sampling& sampling) {
                 return std::make_unique<Sequences>(prompt, std::move(ends), padding, sampling);
               })),
           py::arg("prompt"), py::arg("ends"), py::arg("padding"), py::arg("sampling"))
      .def("append", torch::wrap_pybind_function_no_gil(&Sequences::append), py::arg("logits"))
      .def_property_readonly("length", &Sequences::length)
      .def_property_readonly("goes_on", &Sequences::goes_on)
      .def("tokens", torch::wrap_pybind_function(&Sequences::tokens));
  py::class_<Progress>(module, "Progress")
      .def(py::init<>())
      .def_readonly("count", &Progress::count)
      .def_readonly("outputs", &Progress::outputs);
  py::class_<Loop>(module, "Loop")
      .def(py::init([](std::vector<std::pair<size_t, size_t>> feeds, std::optional<size_t> tokens,
                       size_t logits) { return Loop{std::move(feeds), tokens, logits}; }),
           py::arg("feeds"), py::arg("tokens"), py::arg("logits"));
  py::class_<Register>(module, "Register")
      .def(py::init([](int64_t index) { return Register{index}; }), py::arg("index"))
      .def_readonly("index", &Register::index);
  py::class_<Number>(module, "Number")
      .def(py::init([](int64_t start, int64_t step) { return Number{start, step}; }),
           py::arg("start"), py::arg("step"))
      .def("at", &Number::at, py::arg("position"));
  py::class_<Program>(module, "Program")
      .def(py::init(torch::wrap_pybind_function(&make_program)), py::arg("register_count"),
           py::arg("inputs"), py::arg("outputs"), py::arg("constants"), py::arg("instructions"))
      .def("run", torch::wrap_pybind_function_no_gil(&Program::run), py::arg("position"),
           py::arg("inputs"))
      .def("run_loop", torch::wrap_pybind_function_no_gil(&run_loop_with_signals), py::arg("loop"),
           py::arg("position"), py::arg("inputs"), py::arg("sequences"), py::arg("most"),
           py::arg("progress"))
      .def_property_readonly(
          "lasting_calls",
          py::cpp_function(&Program::lasting_calls, py::call_guard<py::gil_scoped_release>()))
      .def("__len__", &Program::size);
  py::class_<Snapshot>(module, "Snapshot", py::custom_type_setup(&take_part_in_collection))
      .def(py::init(torch::wrap_pybind_function(
               [](py::list containers, std::vector<at::Tensor> tensors) {
                 return std::make_unique<Snapshot>(std::move(containers), std::move(tensors));
               })),
           py::arg("containers"), py::arg("tensors"))
      .def("take", &Snapshot::take)
      .def("holds", &Snapshot::holds);
  py::class_<Changes>(module, "Changes")
      .def(py::init<std::vector<Changes::Change<size_t>>, std::vector<Changes::Change<Number>>>(),
           py::arg("outputs"), py::arg("integers"))
      .def("write", &Changes::write, py::arg("outputs"), py::arg("position"));
}

}  // namespace foo::graphs
