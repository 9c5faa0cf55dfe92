"""foo_ops.custom_ops gives the same results as torch._custom_ops."""

import sys
import typing

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

from foo_ops import custom_ops, library

pytestmark = pytest.mark.filterwarnings("ignore:torch._custom_op is deprecated")


@pytest.fixture(params=APIS)
def api(request):
    return APIS[request.param]


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

    formula = library.autograd.__file__
    x = torch.ones(3)
    assert formula not in files_entered(x)
    assert scaled.__code__.co_filename in files
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
