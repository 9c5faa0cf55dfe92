"""Operators whose gradients are an operator: meaning of argument names, and refusals."""

import re
import weakref

import pytest
import torch

from foo_ops import library


@pytest.fixture
def lib():
    library_ = library.Library("foo_backward", "FRAGMENT")
    yield library_
    library_._destroy()


def define(lib, schema, function):
    """Define an operator as a composite of torch's own operators, below autograd."""
    name = schema.partition("(")[0]
    lib.define(schema)
    lib.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.foo_backward, name)


def make_product(lib, calls):
    """Define a product whose gradients record their arguments."""
    product = define(
        lib, "product(Tensor x, Tensor y, float by) -> Tensor", lambda x, y, by: x * y * by
    )

    def gradients(grad, x, y, by, x_requires_grad):
        calls.append((x is not None, y is not None, x_requires_grad))
        zero = grad.new_zeros(grad.shape)
        return (
            zero if y is None else grad * y * by,
            zero if x is None else grad * x * by,
        )

    define(
        lib,
        "product_backward(Tensor grad, Tensor? x, Tensor? y, float by, bool x_requires_grad)"
        " -> (Tensor, Tensor)",
        gradients,
    )
    library.register_autograd("foo_backward::product", "foo_backward::product_backward", lib=lib)
    return product  # fmt: skip


def test_factors_are_saved_where_another_gradient_is_needed(lib):
    calls = []
    product = make_product(lib, calls)
    x, y = torch.tensor([2.0, 3.0]), torch.tensor([5.0, 7.0])
    x.requires_grad_()
    product(x, y, 2.0).sum().backward()
    assert x.grad.tolist() == [10, 14]
    assert calls.pop() == (False, True, True)
    x.requires_grad_(False)
    y.requires_grad_()
    product(x, y, 2.0).sum().backward()
    assert y.grad.tolist() == [4, 6]
    assert calls.pop() == (True, False, False)
    x.grad = y.grad = None
    x.requires_grad_()
    product(x, y, 2.0).sum().backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([10, 14], [4, 6])
    assert calls.pop() == (True, True, True)


def test_gradients_are_summed_over_what_was_broadcast(lib):
    product = make_product(lib, [])
    x, y = torch.ones(3, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    product(x, y, 1.0).sum().backward()
    assert (x.grad.shape, y.grad.tolist()) == ((3, 2), [3, 3])


def test_an_argument_that_was_changed_is_noticed(lib):
    product = make_product(lib, [])
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    result = product(x, y, 1.0)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_a_graph_is_freed_and_cannot_be_used_again(lib):
    product = make_product(lib, [])
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    result = product(x, y, 1.0).sum()
    alive = weakref.ref(y)
    del y
    result.backward()
    assert alive() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        result.backward()


def test_saved_tensors_pass_through_hooks(lib):
    """For example torch.autograd.graph.save_on_cpu, and checkpointing."""
    product = make_product(lib, [])
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: 2 * packed[index]):
        result = product(x, y, 1.0)
    result.sum().backward()
    assert x.grad.tolist() == [6, 6]


def make_two(lib, schema):
    define(lib, "two(Tensor x) -> (Tensor first, Tensor second)", lambda x: (x * 2, x * 3))
    seen = []

    def gradient(grad_first, grad_second, first):
        seen.append((grad_first, grad_second, first))
        given = [g * f for g, f in ((grad_first, 2), (grad_second, 3)) if g is not None]
        return sum(given)

    define(lib, schema, gradient)
    library.register_autograd("foo_backward::two", "foo_backward::two_backward", lib=lib)
    return torch.ops.foo_backward.two, seen


@pytest.mark.parametrize("mark", ["", "?"])
def test_a_gradient_that_is_missing_is_none_or_zeros(lib, mark):
    schema = f"two_backward(Tensor{mark} grad_first, Tensor{mark} grad_second, Tensor first)"
    two, seen = make_two(lib, f"{schema} -> Tensor grad_x")
    x = torch.ones(3, requires_grad=True)
    first, _ = two(x)
    first.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    _, second, result = seen.pop()
    assert second is None if mark else second.tolist() == [0, 0, 0]
    assert result.tolist() == [2, 2, 2]


def test_a_statistic_that_is_kept_for_the_gradients_has_none(lib):
    """Its backward() raises instead of giving zeros; the backward operator gets it unchanged."""
    scaled = define(
        lib,
        "scaled(Tensor x) -> (Tensor output, Tensor norm)",
        lambda x: (x / x.norm(), x.norm()),
    )
    define(
        lib,
        "scaled_backward(Tensor grad_output, Tensor output, Tensor norm) -> Tensor",
        lambda grad, output, norm: (grad - output * (grad * output).sum()) / norm,
    )
    library.register_autograd("foo_backward::scaled", "foo_backward::scaled_backward", lib=lib)
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    output, norm = scaled(x)
    assert output.requires_grad
    assert not norm.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        norm.backward()
    expected = torch.autograd.grad((x / x.norm())[0], x)
    torch.testing.assert_close(torch.autograd.grad(output[0], x), expected)


def test_a_result_that_is_saved_does_not_keep_itself_alive(lib):
    schema = "two_backward(Tensor grad_first, Tensor grad_second, Tensor first) -> Tensor grad_x"
    two, _ = make_two(lib, schema)
    x = torch.ones(1000, device="foo", requires_grad=True)
    before = torch.foo.memory_allocated()
    results = two(x)
    assert torch.foo.memory_allocated() > before
    del results
    assert torch.foo.memory_allocated() == before


def test_compiled_autograd(lib):
    product = make_product(lib, [])
    x, y = torch.tensor([2.0, 3.0], requires_grad=True), torch.tensor([5.0, 7.0])
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        for by in (2.0, 2.0, 4.0):
            x.grad = None
            (product(x, y, by) + product(x, y, by)).sum().backward()
            assert x.grad.tolist() == [10 * by, 14 * by]


def test_second_derivatives_are_refused_until_they_are_told(lib):
    """Second derivatives are never silently wrong: eager, under torch.func, and in forward mode."""
    define(lib, "square(Tensor x) -> Tensor", lambda x: x * x)
    define(lib, "square_backward(Tensor grad, Tensor x) -> Tensor", lambda grad, x: 2 * grad * x)
    library.register_autograd(
        "foo_backward::square",
        "foo_backward::square_backward",
        composite=lambda x: x * x,
        lib=lib,
    )
    square, x = torch.ops.foo_backward.square, torch.tensor([2.0, 3.0], requires_grad=True)
    (first,) = torch.autograd.grad(square(x).sum(), x, create_graph=True)
    message = (
        "foo_backward::square_backward: it has no derivative, since it computes the gradients of "
        "foo_backward::square; to get one, register a composite for it with "
        "foo_ops.library.register_autograd"
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        first.sum().backward()
    slope = torch.func.grad(lambda x: square(x).sum())
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            transform(slope)(x.detach())
    library.register_autograd(
        "foo_backward::square_backward", composite=lambda grad, x: 2 * grad * x, lib=lib
    )
    (first,) = torch.autograd.grad(square(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [2, 2]
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        assert transform(slope)(x.detach()).tolist() == [[2, 0], [0, 2]]


def test_a_gradient_that_is_not_returned(lib):
    define(lib, "plus(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y)
    define(lib, "plus_backward(Tensor grad) -> Tensor grad_x", lambda grad: grad.clone())
    library.register_autograd("foo_backward::plus", "foo_backward::plus_backward", lib=lib)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    torch.ops.foo_backward.plus(x, y).sum().backward()
    assert x.grad.tolist() == [1, 1]
    message = "foo_backward::plus: foo_backward::plus_backward returns no gradient for y"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        torch.ops.foo_backward.plus(x, y.requires_grad_())


def test_one_gradient_for_two_arguments(lib):
    define(lib, "plus(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y)
    define(lib, "plus_backward(Tensor grad) -> Tensor grad_x_and_y", lambda grad: 2 * grad)
    plus_backward = torch.ops.foo_backward.plus_backward
    library.register_autograd("foo_backward::plus", plus_backward, lib=lib)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    torch.ops.foo_backward.plus(x, y).sum().backward()
    assert x.grad.tolist() == y.grad.tolist() == [2, 2]


WRONG = {
    "an argument": (
        "f_backward(Tensor grad, Tensor z) -> Tensor",
        "foo_backward::f_backward: argument z must be an argument or a result of foo_backward::f, "
        "the gradient of a result (grad_<result>), or whether an argument needs a gradient "
        "(<argument>_requires_grad)",
    ),
    "the type of an argument": (
        "f_backward(Tensor grad, float x) -> Tensor",
        "foo_backward::f_backward: argument x must have the same type as in foo_backward::f, "
        "got float",
    ),
    "a result": (
        "f_backward(Tensor grad) -> Tensor gradient",
        "foo_backward::f_backward: one of its results must be named grad_<argument> for a "
        "tensor of foo_backward::f",
    ),
    "the number of results": (
        "f_backward(Tensor grad) -> (Tensor, Tensor)",
        "foo_backward::f_backward: must have 1 results if they have no names, one for each "
        "tensor of foo_backward::f, got 2",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_names_that_do_not_fit(lib, what):
    schema, message = WRONG[what]
    lib.define("f(Tensor x) -> Tensor")
    lib.define(schema)
    with pytest.raises(TypeError, match=re.escape(message)):
        library.register_autograd("foo_backward::f", "foo_backward::f_backward", lib=lib)


def test_what_does_not_go_together(lib):
    lib.define("f(Tensor x) -> Tensor")
    name = "foo_backward::f"
    with pytest.raises(TypeError, match=f"{name}: register_autograd must be given backward"):
        library.register_autograd(name, lib=lib)
    with pytest.raises(TypeError, match=f"{name}: setup_context must be None unless backward"):
        library.register_autograd(name, f"{name}_backward", setup_context=print, lib=lib)
