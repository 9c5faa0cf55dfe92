// Formulas written in Python.

#include <c10/core/SafePyObject.h>
#include <c10/util/irange.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "bindings/python.h"

namespace foo {

namespace {

namespace py = pybind11;
using torch::autograd::variable_list;

// Holds an object that is released with the GIL, or not at all if the interpreter is gone.
c10::SafePyObject hold(py::object object) {
  return {object.release().ptr(), getPyInterpreter()};
}

py::handle get(const c10::SafePyObject& object) {
  return object.ptr(getPyInterpreter());
}

// Runs a function that calls Python, which may raise.
template <class Function>
auto with_python(const Function& function) {
  const py::gil_scoped_acquire gil;
  try {
    return function();
  } catch (py::error_already_set& error) {
    pass_on(error);
  }
}

py::tuple to_tuple(c10::ArrayRef<c10::IValue> values, const std::vector<c10::Argument>& declared) {
  py::tuple tuple(values.size());
  for (const auto i : c10::irange(values.size())) {
    const c10::Type& type = *declared[i].real_type();
    const auto* const optional = type.castRaw<c10::OptionalType>();
    tuple[i] = to_python(values[i], optional ? optional->getElementType()->kind() : type.kind());
  }
  return tuple;
}

// Converts missing tensors to None.
py::tuple to_tuple(const variable_list& tensors) {
  py::tuple tuple(tensors.size());
  for (const auto i : c10::irange(tensors.size())) tuple[i] = py::cast(tensors[i]);
  return tuple;
}

variable_list to_tensors(const py::handle& objects, const std::string& name, const char* what) {
  variable_list tensors;
  for (const py::handle object : objects) {
    TORCH_CHECK_TYPE(object.is_none() || THPVariable_Check(object.ptr()), name, ": ", what,
                     " tensors or None, got ", Py_TYPE(object.ptr())->tp_name);
    tensors.push_back(object.is_none() ? at::Tensor() : object.cast<at::Tensor>());
  }
  return tensors;
}

// Methods of a Formula of foo_ops/library/autograd.py.
struct Methods {
  explicit Methods(const py::object& formula)
      : keep(hold(formula.attr("keep"))),
        key(hold(formula.attr("key"))),
        gradients(hold(formula.attr("gradients"))) {}

  c10::SafePyObject keep;
  c10::SafePyObject key;
  c10::SafePyObject gradients;
};

// Gradients of one call, with the data that its formula keeps.
class PythonGradients final : public Gradients {
 public:
  PythonGradients(std::string name, std::shared_ptr<const Methods> formula, py::object kept)
      : name_(std::move(name)), formula_(std::move(formula)), kept_(hold(std::move(kept))) {}

  const std::string& name() const override { return name_; }

  std::string key() const override {
    return with_python([&] { return get(formula_->key)(get(kept_)).cast<std::string>(); });
  }

  variable_list gradients(const variable_list& of_results, const SavedForBackward& saved,
                          const std::vector<bool>& needed) const override {
    variable_list given = of_results;
    at::OptionalDeviceGuard guard;
    for (const auto i : c10::irange(saved.results.size())) {
      if (!given[i].defined()) given[i] = saved.results[i].zeros(guard);
    }
    return with_python([&] {
      return to_tensors(get(formula_->gradients)(get(kept_), to_tuple(saved.tensors),
                                                 py::cast(needed), to_tuple(given)),
                        name_, "the backward pass must return");
    });
  }

 private:
  std::string name_;
  std::shared_ptr<const Methods> formula_;
  c10::SafePyObject kept_;
};

class PythonFormula final : public Formula {
 public:
  PythonFormula(std::string name, const py::object& formula)
      : name_(std::move(name)), formula_(std::make_shared<const Methods>(formula)) {}

  KeptByFormula keep(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments,
                     c10::ArrayRef<c10::IValue> results) const override {
    return with_python([&] {
      const py::tuple kept = get(formula_->keep)(to_tuple(arguments, schema.arguments()),
                                                 to_tuple(results, schema.returns()));
      return KeptByFormula{
          std::make_shared<const PythonGradients>(name_ + "_backward", formula_, kept[0]),
          to_tensors(kept[1], name_, "save_for_backward must be given"),
          to_tensors(kept[2], name_, "mark_non_differentiable must be given"),
          kept[3].cast<bool>()};
    });
  }

 private:
  std::string name_;
  std::shared_ptr<const Methods> formula_;
};

}  // namespace

std::shared_ptr<const Formula> make_python_formula(const std::string& operator_name,
                                                   const py::object& formula) {
  return std::make_shared<const PythonFormula>(operator_name, formula);
}

}  // namespace foo
