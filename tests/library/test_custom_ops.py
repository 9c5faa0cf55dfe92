"""foo_ops.custom_ops beside torch._custom_ops: the same results, the same errors."""

import itertools
import re
import sys
import typing

import pytest
import torch
from torch import Tensor

from foo_ops import custom_ops, library

pytestmark = pytest.mark.filterwarnings("ignore:torch._custom_op is deprecated")

NAMES = map("op{}".format, itertools.count())


class Torchs:
    """torch's own copy, with the name that only ours has."""

    def __getattr__(self, name):
        import torch._custom_ops

        return getattr(torch._custom_ops, "_destroy" if name == "destroy" else name)


APIS = {"torch": Torchs(), "foo": custom_ops}


@pytest.fixture(params=APIS)
def api(request):
    return APIS[request.param]


def define(api, schema="(Tensor x, float factor) -> Tensor"):
    qualname = f"older::{next(NAMES)}"
    api.custom_op(qualname, schema)
    return qualname


def find(qualname):
    return getattr(torch.ops.older, qualname.removeprefix("older::"))


def scaled(api, backward=None, save=None, **options):
    """x * factor, with a formula where one is given."""
    qualname = define(api)
    api.impl(qualname, device_types="cpu")(lambda x, factor: x * factor)
    api.impl_abstract(qualname)(lambda x, factor: torch.empty_like(x))
    if save is not None:
        api.impl_save_for_backward(qualname)(save)
    if backward is not None:
        api.impl_backward(qualname, **options)(backward)
    return qualname


# ----------------------------------------------------------------------------------- what works


@pytest.mark.parametrize("form", ["decorator", "function", "schema"])
def test_operator_is_defined(form, api):
    name = next(NAMES)

    def function(x: Tensor, sizes: typing.Sequence[int], factor: float = 2.0) -> Tensor:
        raise AssertionError("the body is not run")

    function.__name__ = name
    if form == "schema":
        schema = "(Tensor x, SymInt[] sizes, float factor=2.) -> Tensor"
        assert api.custom_op(f"older::{name}", schema) is None
    elif form == "function":
        assert api.custom_op(f"older::{name}", function) is function
    else:
        assert api.custom_op(f"older::{name}")(function) is function
    schema = f"older::{name}(Tensor x, SymInt[] sizes, float factor=2.) -> Tensor"
    assert str(find(name).default._schema) == schema


def test_kernel_runs_on_its_device(device):
    qualname = define(custom_ops)

    @custom_ops.impl(qualname, device_types=("cpu", "foo"))
    def kernel(x, factor):
        assert x.device.type == device
        return x * factor

    x = torch.arange(3.0, device=device)
    assert find(qualname)(x, 2.0).tolist() == [0, 2, 4]


def test_device_types_default_to_all():
    qualname = define(custom_ops)
    kernel = lambda x, factor: x.clone()  # noqa: E731
    assert custom_ops.impl(qualname, func=kernel) is kernel
    for key in ("CPU", "CUDA", "PrivateUse1"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(qualname, key)


def test_kernel_of_an_operator_of_torch_library(api):
    name = next(NAMES)
    torch.library.define(f"older::{name}", "(Tensor x) -> Tensor")
    api.impl(f"older::{name}", device_types="cpu")(torch.neg)
    api.impl_save_for_backward(f"older::{name}")(lambda inputs, output: None)
    api.impl_backward(f"older::{name}")(lambda ctx, saved, grad: {"x": -grad})
    x = torch.ones(2, requires_grad=True)
    find(name)(x).sum().backward()
    assert x.grad.tolist() == [-1, -1]


def test_abstract_kernel(api):
    qualname = scaled(api)
    assert find(qualname)(torch.empty(3, 4, device="meta"), 2.0).shape == (3, 4)


def test_size_that_depends_on_data(device):
    qualname = define(custom_ops, "(Tensor x) -> Tensor")
    custom_ops.impl(qualname, device_types=("cpu", "foo"))(lambda x: x[x > 0])

    @custom_ops.impl_abstract(qualname)
    def abstract(x):
        return x.new_empty(custom_ops.get_ctx().new_dynamic_size())

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = torch.compile(lambda x: find(qualname)(x) * 2, backend="aot_eager", fullgraph=True)
        assert graph(torch.tensor([1.0, -1, 3]).to(device)).tolist() == [2, 6]


def save_factor(inputs, output):
    return inputs.factor


def backward_of_factor(ctx, factor, grad):
    return {"x": grad * factor}


def test_gradient(device):
    qualname = scaled(custom_ops, backward_of_factor, save_factor)
    x = torch.ones(3, device=device, requires_grad=True)
    find(qualname)(x, 3.0).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]
    results = library.opcheck(find(qualname).default, (x, 3.0))
    assert results == dict.fromkeys(results, "SUCCESS")
    assert len(results) == 4


def test_order_of_the_two_parts_does_not_matter(api):
    qualname = scaled(api)
    api.impl_backward(qualname)(backward_of_factor)
    api.impl_save_for_backward(qualname)(save_factor)
    x = torch.ones(3, requires_grad=True)
    find(qualname)(x, 3.0).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]


def test_inputs_come_as_a_named_tuple_and_what_is_saved_comes_back(api):
    schema = "(Tensor x, Tensor? y, Tensor[] others, int count=3) -> (Tensor, Tensor)"
    qualname = define(api, schema)
    api.impl(qualname, device_types="cpu")(lambda x, y, others, count: (x * 2, x * count))
    seen = []

    def save(inputs, output):
        seen.append((type(inputs).__name__, inputs._fields, inputs.count, inputs.y, len(output)))
        return {"tensors": [inputs.x, output[0]], "number": 7, "others": inputs.others}

    def backward(ctx, saved, first, second):
        x, output = saved["tensors"]
        assert torch.equal(output, x * 2)
        assert saved["number"] == 7
        grad = first * 2 + second * 5
        return {"x": grad, "y": None, "others": [None, grad * saved["others"][1]]}

    api.impl_save_for_backward(qualname)(save)
    api.impl_backward(qualname)(backward)
    x, other = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    first, second = find(qualname)(x, None, [torch.ones(2), other], 5)
    (first + second).sum().backward()
    assert x.grad.tolist() == [7, 7]
    assert other.grad.tolist() == [21, 21]
    name = qualname.partition("::")[2]
    assert seen == [(f"{name}_args", ("x", "y", "others", "count"), 5, None, 2)]


def test_defaults_and_keywords_reach_the_formula():
    qualname = define(custom_ops, "(Tensor x, int count=3, *, float factor=0.5) -> Tensor")
    custom_ops.impl(qualname)(lambda x, count=3, *, factor=0.5: x * count * factor)
    custom_ops.impl_save_for_backward(qualname)(lambda inputs, output: inputs[1:])
    custom_ops.impl_backward(qualname)(lambda ctx, saved, grad: {"x": grad * saved[0] * saved[1]})
    x = torch.ones((), requires_grad=True)
    (find(qualname)(x, factor=2.0) + find(qualname)(x, 4)).backward()
    assert x.grad.item() == 3 * 2.0 + 4 * 0.5


def test_calls_that_need_no_gradient_do_not_enter_the_formula():
    qualname = scaled(custom_ops, lambda ctx, saved, grad: {"x": grad}, lambda inputs, output: None)
    files = set()

    def files_entered(x):
        files.clear()
        sys.setprofile(lambda frame, event, arg: files.add(frame.f_code.co_filename))
        try:
            find(qualname)(x, 2.0)
        finally:
            sys.setprofile(None)
        return files

    formula = torch._library.autograd.__file__
    x = torch.ones(3)
    assert formula not in files_entered(x)
    assert __file__ in files
    x.requires_grad_()
    assert formula in files_entered(x)
    with torch.no_grad():
        assert formula not in files_entered(x)


@pytest.mark.parametrize("differentiability", [None, [True, False], [True, True]])
def test_output_differentiability(differentiability, api):
    qualname = define(api, "(Tensor x) -> (Tensor, Tensor)")
    api.impl(qualname, device_types="cpu")(lambda x: (x.clone(), x.clone()))
    api.impl_save_for_backward(qualname)(lambda inputs, output: None)
    api.impl_backward(qualname, output_differentiability=differentiability)(
        lambda ctx, saved, first, second: {"x": first}
    )
    outputs = find(qualname)(torch.ones(2, requires_grad=True))
    expected = differentiability or [True, True]
    assert [output.requires_grad for output in outputs] == expected


def test_list_of_outputs_that_have_no_gradient(api):
    qualname = define(api, "(Tensor x) -> (Tensor[], Tensor)")
    api.impl(qualname, device_types="cpu")(lambda x: ([x.clone(), x.clone()], x.clone()))
    api.impl_save_for_backward(qualname)(lambda inputs, output: None)
    api.impl_backward(qualname, output_differentiability=[False, True])(
        lambda ctx, saved, grads, grad: {"x": grad}
    )
    x = torch.ones(2, requires_grad=True)
    several, one = find(qualname)(x)
    assert [output.requires_grad for output in several] == [False, False]
    one.sum().backward()
    assert x.grad.tolist() == [1, 1]


def test_destroyed_operator_can_be_defined_anew(api):
    qualname = scaled(api, backward_of_factor, save_factor)
    packet = find(qualname)
    api.destroy(qualname)
    assert not hasattr(torch.ops.older, qualname.partition("::")[2])
    api.custom_op(qualname, "(Tensor x) -> Tensor")
    api.impl(qualname, device_types="cpu")(torch.neg)
    assert find(qualname)(torch.ones(())).item() == -1
    assert find(qualname) is not packet


def test_compiled(device):
    qualname = scaled(custom_ops, backward_of_factor, save_factor)
    graph = torch.compile(
        lambda x: find(qualname)(x * 2, 3.0) + 1, backend="aot_eager", fullgraph=True
    )
    x = torch.ones(3, device=device, requires_grad=True)
    result = graph(x)
    result.sum().backward()
    assert result.tolist() == [7, 7, 7]
    assert x.grad.tolist() == [6, 6, 6]


# -------------------------------------------------------------------------------- the same errors


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
    """Of x and others, what backward returns."""

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
    """Type and text of what is raised, without what differs from call to call."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        mistake(api)
    text = re.sub(r"op\d+", "op", str(caught.value))
    text = re.sub(r" at \S+\.py:\d+", " at LOCATION", text)
    return caught.type, text.replace("'cpu', 'cuda', 'foo'", "'cpu', 'cuda'")


@pytest.mark.parametrize("mistake", MISTAKES, ids=name_of)
def test_same_error_as_torch(mistake):
    expected_type, expected = message_of(mistake, APIS["torch"])
    type_, text = message_of(mistake, APIS["foo"])
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
    with pytest.raises(RuntimeError, match=r"registered from Python at .*test_custom_ops\.py:\d+"):
        custom_ops.impl(qualname, device_types="cpu")(torch.neg)
