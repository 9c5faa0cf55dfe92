"""foo_ops.custom_ops refuses what torch._custom_ops refuses, with the same errors."""

import re

import pytest
import torch
from support.older_operators import (
    APIS,
    NAMES,
    backward_of_factor,
    define,
    find,
    save_factor,
    scaled,
)
from torch import Tensor

from foo_ops import custom_ops

pytestmark = pytest.mark.filterwarnings("ignore:torch._custom_op is deprecated")


def name_of(function):
    return function.__name__


def call_with_gradient(qualname):
    find(qualname)(torch.ones(3, requires_grad=True), 2.0).sum().backward()


def without_namespace(api):
    api.custom_op("name")


def with_overload(api):
    api.custom_op("older::name.overload")


def namespace_of_torch(api):
    api.custom_op("aten::name")


def namespace_with_a_dot(api):
    api.custom_op("older.inner::name")


def no_function(api):
    api.custom_op("older::name")(3)


def a_class(api):
    api.custom_op("older::object", object)


def function_of_another_name(api):
    def other(x: Tensor) -> Tensor: ...

    api.custom_op("older::name", other)


def function_without_annotations(api):
    def name(x): ...

    api.custom_op("older::name", name)


def function_with_an_unknown_type(api):
    def name(x: set) -> Tensor: ...

    api.custom_op("older::name", name)


def function_with_varargs(api):
    def name(*x: Tensor) -> Tensor: ...

    api.custom_op("older::name", name)


def malformed_schema(api):
    api.custom_op("older::name", "(Tensor x -> Tensor")


def schema_that_writes(api):
    api.custom_op("older::name", "(Tensor(a!) x) -> Tensor")


def schema_of_a_view(api):
    api.custom_op("older::name", "(Tensor(a) x) -> Tensor(a)")


def schema_without_returns(api):
    api.custom_op("older::name", "(Tensor x) -> ()")


def argument_called_self(api):
    api.custom_op("older::name", "(Tensor self) -> Tensor")


def unknown_operator(api):
    api.impl("older::there_is_none")(torch.neg)


def unknown_namespace(api):
    api.impl_backward("there_is_none::name")(torch.neg)


def destroying_an_unknown_operator(api):
    api.destroy("older::there_is_none")


def two_kernels(api):
    qualname = scaled(api)
    api.impl(qualname, device_types=("cuda", "cpu"))(torch.neg)


def kernel_beside_one_of_torch_library(api):
    name = next(NAMES)
    torch.library.define(f"older::{name}", "(Tensor x) -> Tensor")
    torch.library.impl(f"older::{name}", "cpu", torch.neg)
    api.impl(f"older::{name}", device_types="cpu")(torch.neg)


def kernel_of_a_composite_operator(api):
    name = next(NAMES)
    torch.library.define(f"older::{name}", "(Tensor x) -> Tensor")
    torch.library.impl(f"older::{name}", "CompositeImplicitAutograd", torch.neg)
    api.impl(f"older::{name}", device_types="cuda")(torch.neg)


def no_kernel(api):
    find(define(api))(torch.ones(3), 2.0)


def no_abstract_kernel(api):
    find(define(api))(torch.ones(3, device="meta"), 2.0)


def no_tensors(api):
    find(define(api, "(Tensor[] xs) -> Tensor"))([])


def no_sparse_kernel(api):
    find(define(api))(torch.ones(3).to_sparse(), 2.0)


def no_formula(api):
    call_with_gradient(scaled(api))


def half_a_formula(api):
    call_with_gradient(scaled(api, save=save_factor))


def the_other_half(api):
    qualname = scaled(api, backward_of_factor)
    find(qualname)(torch.ones(3), 2.0)


def two_formulas(api):
    qualname = scaled(api, backward_of_factor, save_factor)
    api.impl_backward(qualname)(backward_of_factor)


def two_functions_that_save(api):
    qualname = scaled(api, save=save_factor)
    api.impl_save_for_backward(qualname)(save_factor)


def formula_beside_one_of_torch_library(api):
    name = next(NAMES)
    torch.library.define(f"older::{name}", "(Tensor x) -> Tensor")
    torch.library.register_autograd(f"older::{name}", lambda ctx, grad: grad)
    api.impl_backward(f"older::{name}")(backward_of_factor)


def formula_of_a_composite_operator(api):
    name = next(NAMES)
    torch.library.define(f"older::{name}", "(Tensor x) -> Tensor")
    torch.library.impl(f"older::{name}", "CompositeImplicitAutograd", torch.neg)
    api.impl_save_for_backward(f"older::{name}")(save_factor)


def formula_of_an_operator(schema):
    def mistake(api):
        name = next(NAMES)
        torch.library.define(f"older::{name}", schema)
        api.impl_backward(f"older::{name}")(backward_of_factor)

    mistake.__name__ = f"formula of {schema}"
    return mistake


def differentiability(value):
    def mistake(api):
        api.impl_backward(scaled(api), output_differentiability=value)(backward_of_factor)

    mistake.__name__ = f"output_differentiability={value}"
    return mistake


def differentiable_number(api):
    qualname = define(api, "(Tensor x) -> (Tensor, int)")
    api.impl(qualname, device_types="cpu")(lambda x: (x.clone(), 3))
    api.impl_save_for_backward(qualname)(lambda inputs, output: None)
    api.impl_backward(qualname, [True, True])(lambda ctx, saved, *grads: {"x": grads[0]})
    find(qualname)(torch.ones(3, requires_grad=True))


def gradients(schema, gradients, *others):
    """Return a mistake: backward returns these gradients for x and the other inputs."""

    def mistake(api):
        qualname = define(api, schema)
        api.impl(qualname, device_types="cpu")(lambda x, *others: x.clone())
        api.impl_save_for_backward(qualname)(lambda inputs, output: None)
        api.impl_backward(qualname)(lambda ctx, saved, grad: gradients)
        find(qualname)(torch.ones(2, requires_grad=True), *others).sum().backward()

    mistake.__name__ = f"gradients {gradients}"
    return mistake


ONE = "(Tensor x, int n) -> Tensor"


OPTIONAL = "(Tensor x, Tensor? y) -> Tensor"


LIST = "(Tensor x, Tensor[] ys) -> Tensor"


PAIR = [torch.ones(2), torch.ones(2)]


GRAD = torch.ones(2)


MISTAKES = [
    without_namespace,
    with_overload,
    namespace_of_torch,
    namespace_with_a_dot,
    no_function,
    a_class,
    function_of_another_name,
    function_without_annotations,
    function_with_an_unknown_type,
    function_with_varargs,
    malformed_schema,
    schema_that_writes,
    schema_of_a_view,
    schema_without_returns,
    argument_called_self,
    unknown_operator,
    unknown_namespace,
    destroying_an_unknown_operator,
    two_kernels,
    kernel_beside_one_of_torch_library,
    kernel_of_a_composite_operator,
    no_kernel,
    no_abstract_kernel,
    no_tensors,
    no_sparse_kernel,
    no_formula,
    half_a_formula,
    the_other_half,
    two_formulas,
    two_functions_that_save,
    formula_beside_one_of_torch_library,
    formula_of_a_composite_operator,
    formula_of_an_operator("(Tensor(a!) x) -> Tensor"),
    formula_of_an_operator("(Tensor x) -> ()"),
    formula_of_an_operator("(Tensor(a) x) -> Tensor(a)"),
    formula_of_an_operator("(Tensor x) -> Scalar"),
    formula_of_an_operator("(Tensor x) -> (Tensor, str)"),
    differentiability((True,)),
    differentiability([1]),
    differentiability([True, False]),
    differentiable_number,
    gradients(ONE, GRAD, 1),
    gradients(ONE, {}, 1),
    gradients(ONE, {"x": GRAD, "n": None}, 1),
    gradients(ONE, {"x": 3}, 1),
    gradients(OPTIONAL, {"x": GRAD, "y": GRAD}, None),
    gradients(LIST, {"x": GRAD, "ys": GRAD}, PAIR),
    gradients(LIST, {"x": GRAD, "ys": [GRAD]}, PAIR),
    gradients(LIST, {"x": GRAD, "ys": [None, 3]}, PAIR),
]


def message_of(mistake, api):
    """Return the error's type and text, without the parts that differ from call to call."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        mistake(api)
    text = re.sub(r"op\d+", "op", str(caught.value))
    text = re.sub(r" at \S+\.py:\d+", " at LOCATION", text)
    return caught.type, text.replace("'cpu', 'cuda', 'foo'", "'cpu', 'cuda'")


# Typing errors in messages of torch 2.13.
SLIPS = {" vi a ": " via a ", "have be marked": "have been marked"}


@pytest.mark.parametrize("mistake", MISTAKES, ids=name_of)
def test_same_error_as_torch(mistake):
    expected_type, expected = message_of(mistake, APIS["torch"])
    type_, text = message_of(mistake, APIS["foo"])
    for slip, right in SLIPS.items():
        expected = expected.replace(slip, right)
    assert text == expected
    assert type_ is expected_type


def test_unknown_device_type():
    qualname = define(custom_ops)
    message = r"CustomOp\.impl\(device_types=\[xla, \.\.\.\]\): we only support device_type in "
    with pytest.raises(ValueError, match=message + r"dict_keys\(\['cpu', 'cuda', 'foo'\]\)\."):
        custom_ops.impl(qualname, device_types=("cpu", "xla"))(torch.neg)


def test_two_kernels_of_foo():
    qualname = define(custom_ops)
    custom_ops.impl(qualname, device_types="foo")(torch.neg)
    with pytest.raises(RuntimeError, match="Attempting to register a foo impl"):
        custom_ops.impl(qualname, device_types="foo")(torch.neg)


def test_kernel_of_foo_beside_one_of_torch_library():
    name = next(NAMES)
    torch.library.define(f"older::{name}", "(Tensor x) -> Tensor")
    torch.library.impl(f"older::{name}", "foo", torch.neg)
    with pytest.raises(RuntimeError, match=r"impl\(..., device_types=foo\): the operator older::"):
        custom_ops.impl(f"older::{name}", device_types="foo")(torch.neg)


def test_errors_say_where_the_other_registration_is():
    qualname = scaled(custom_ops)
    with pytest.raises(RuntimeError, match=r"registered from Python at .*older_operators\.py:\d+"):
        custom_ops.impl(qualname, device_types="cpu")(torch.neg)
