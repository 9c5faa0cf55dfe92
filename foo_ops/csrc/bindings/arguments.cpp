// Conversion of operators' arguments between Python and C++.

#include <torch/csrc/jit/python/pybind_utils.h>

#include <map>
#include <utility>

#include "bindings/python.h"

namespace py = pybind11;

namespace foo {

namespace {

// Returns a list of tensors; for a list of numbers only its length counts.
c10::IValue list_of(const py::sequence& list) {
  std::vector<at::Tensor> tensors;
  for (const py::handle item : list) {
    if (!THPVariable_Check(item.ptr())) return std::vector<int64_t>(py::len(list));
    tensors.push_back(THPVariable_Unpack(item.ptr()));
  }
  return tensors;
}

}  // namespace

Parameter make_parameter(std::string name, const std::string& kind, bool is_optional,
                         const std::string& role, std::vector<std::string> choices, int64_t length,
                         std::vector<at::ScalarType> own_types, std::string own_types_in_words) {
  using Kind = Parameter::Kind;
  using Role = Parameter::Role;
  static const std::map<std::string, Kind> kinds = {
      {"tensor", Kind::kTensor}, {"tensors", Kind::kTensors},    {"float", Kind::kFloat},
      {"int", Kind::kInt},       {"bool", Kind::kBool},          {"scalar", Kind::kScalar},
      {"ints", Kind::kInts},     {"floats", Kind::kFloats},      {"text", Kind::kText},
      {"dtype", Kind::kDtype},   {"generator", Kind::kGenerator}};
  static const std::map<std::string, Role> roles = {
      {"read", Role::kRead}, {"in place", Role::kInPlace}, {"out", Role::kOut}};
  return {std::move(name),      kinds.at(kind),
          is_optional,          roles.at(role),
          std::move(own_types), std::move(own_types_in_words),
          std::move(choices),   length};
}

py::object to_python(const c10::IValue& value, c10::TypeKind kind) {
  if (!value.isInt()) return torch::jit::toPyObject(value);
  switch (kind) {
    case c10::TypeKind::ScalarTypeType:
      return py::cast(value.toScalarType());
    case c10::TypeKind::LayoutType:
      return py::cast(value.toLayout());
    case c10::TypeKind::MemoryFormatType:
      return py::cast(value.toMemoryFormat());
    default:
      return torch::jit::toPyObject(value);
  }
}

Refusal refusal(py::object function, std::vector<Parameter> parameters) {
  // Leaked: registrations outlive the interpreter, and Python objects must not.
  const py::handle refuse = function.release();
  return [refuse, parameters = std::move(parameters)](c10::ArrayRef<c10::IValue> arguments) {
    const py::gil_scoped_acquire gil;
    try {
      py::tuple values(arguments.size());
      for (size_t i = 0; i < arguments.size(); ++i) {
        const bool is_dtype = parameters[i].kind == Parameter::Kind::kDtype;
        values[i] = to_python(arguments[i],
                              is_dtype ? c10::TypeKind::ScalarTypeType : c10::TypeKind::AnyType);
      }
      refuse(*values);
    } catch (py::error_already_set& error) {
      pass_on(error);
    }
  };
}

std::vector<c10::IValue> values_of(const py::list& arguments) {
  std::vector<c10::IValue> values;
  for (const py::handle argument : arguments) {
    PyObject* const object = argument.ptr();
    if (THPVariable_Check(object)) {
      values.emplace_back(THPVariable_Unpack(object));
    } else if (PyUnicode_Check(object)) {
      values.emplace_back(argument.cast<std::string>());
    } else if (PyBool_Check(object)) {
      values.emplace_back(argument.cast<bool>());
    } else if (PyLong_Check(object) || torch::is_symint(argument)) {
      values.emplace_back(int64_t(0));
    } else if (PyFloat_Check(object) || torch::is_symfloat(argument)) {
      values.emplace_back(0.0);
    } else if (PyComplex_Check(object)) {
      values.emplace_back(c10::complex<double>());
    } else if (PySequence_Check(object)) {
      values.push_back(list_of(py::reinterpret_borrow<py::sequence>(argument)));
    } else {
      values.emplace_back();
    }
  }
  return values;
}

}  // namespace foo
