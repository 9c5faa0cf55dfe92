"""Gradient formulas in Python: their arguments, saved tensors, and return values."""

import gc
import re
import threading
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from foo_ops import library

DOUBLE = torch.float64


@pytest.fixture
def lib():
    library_ = library.Library("foo_formulas", "FRAGMENT")
    yield library_
    library_._destroy()


def define(lib, schema, function, backward, setup_context=None, **options):
    """Define an operator as a composite of torch's own operators, with a gradient formula."""
    name = schema.partition("(")[0]
    lib.define(schema)
    lib.impl(name, function, "CompositeExplicitAutograd")
    library.register_autograd(
        f"foo_formulas::{name}", backward, setup_context=setup_context, lib=lib, **options
    )
    return getattr(torch.ops.foo_formulas, name)


def make_cube(lib, **options):
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.by = inputs[1]

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad * ctx.by, None

    return define(
        lib, "cube(Tensor x, float by) -> Tensor", lambda x, by: x**3 * by, backward,
        setup_context, **options,
    )  # fmt: skip


def leaf(*shape, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, dtype=DOUBLE, generator=generator).to(device).requires_grad_()


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_gradients_of_every_order(lib, device):
    cube = make_cube(lib)
    x = leaf(5, device=device)
    assert torch.autograd.gradcheck(lambda x: cube(x, 2.0), x)
    assert torch.autograd.gradgradcheck(lambda x: cube(x, 2.0), x)


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_transforms(lib, device):
    cube, x = make_cube(lib), leaf(2, 3, device=device).detach()

    def total(x):
        return cube(x, 2.0).sum()

    torch.testing.assert_close(torch.func.grad(total)(x), 6 * x * x)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(x), 6 * x * x)
    torch.testing.assert_close(torch.func.vjp(total, x)[1](x.new_tensor(3.0))[0], 18 * x * x)
    second = torch.func.jacrev(torch.func.grad(total))(x[0])
    torch.testing.assert_close(second, torch.diag(12 * x[0]))


def test_tangents_go_through_a_composite(lib):
    cube, x = make_cube(lib, composite=lambda x, by: x**3 * by), leaf(3).detach()
    _, tangent = torch.func.jvp(lambda x: cube(x, 2.0), (x,), (x,))
    torch.testing.assert_close(tangent, 6 * x**3)
    hessian = torch.func.hessian(lambda x: cube(x, 2.0).sum())(x)
    torch.testing.assert_close(hessian, torch.diag(12 * x))
    # The formula computes the gradients.
    assert cube(leaf(3), 2.0).grad_fn.name() == "CubeBackward"


def test_tangents_are_refused_without_one(lib):
    cube = make_cube(lib)
    message = "foo_formulas::cube: forward-mode differentiation is not implemented; to get it, pass"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda x: cube(x, 2.0), (torch.ones(2),), (torch.ones(2),))
    both = make_sum(lib)
    with pytest.raises(NotImplementedError, match="foo_formulas::sum: forward-mode"):
        torch.func.jvp(lambda x: both([x], None), (torch.ones(2),), (torch.ones(2),))


def make_sum(lib):
    """Define a sum of tensors in lists; its formula records which gradients are needed."""
    needed = []

    def setup_context(ctx, inputs, output):
        needed.append(ctx.needs_input_grad)

    def backward(ctx, grad):
        needed.append(ctx.needs_input_grad)
        tensors, weights = ctx.needs_input_grad
        return [grad if it else None for it in tensors], grad.sum() if weights else None

    def function(tensors, weight):
        return sum(tensors) + (0 if weight is None else weight)

    operator = define(
        lib, "sum(Tensor[] tensors, Tensor? weight) -> Tensor", function, backward, setup_context
    )
    operator.needed = needed
    return operator


def test_lists_and_optional_tensors(lib):
    operator = make_sum(lib)
    x, y, weight = leaf(3), leaf(3), torch.tensor(2.0, dtype=DOUBLE, requires_grad=True)
    operator([x, y.detach(), x], weight).sum().backward()
    assert operator.needed == [([True, False, True], True)] * 2
    assert (x.grad.tolist(), weight.grad.item()) == ([2, 2, 2], 3)
    operator.needed.clear()
    operator([y], None).sum().backward()
    assert operator.needed == [([True], False)] * 2
    assert y.grad.tolist() == [1, 1, 1]
    weight.grad = None
    (gradient,) = torch.autograd.grad(operator([x, y], weight).sum(), weight)
    assert gradient.item() == 3
    assert operator.needed[-1] == ([False, False], True)


def test_results_that_are_lists(lib):
    def backward(ctx, of_parts, of_size):
        assert of_size is None
        return torch.cat(of_parts)

    split = define(
        lib, "split(Tensor x) -> (Tensor[], int)", lambda x: (list(x.clone().split(2)), 2), backward
    )
    x = leaf(5)
    parts, size = split(x)
    assert ([part.shape[0] for part in parts], size) == ([2, 2, 1], 2)
    (parts[0].sum() + 3 * parts[2].sum()).backward()
    assert x.grad.tolist() == [1, 1, 0, 0, 3]


@pytest.mark.parametrize("materializes", [True, False])
def test_gradients_that_are_missing(lib, materializes):
    given = []

    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(materializes)

    def backward(ctx, first, second):
        given.append(second)
        return first

    pair = define(
        lib, "pair(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x.float()), backward,
        setup_context,
    )  # fmt: skip
    x = leaf(2)
    pair(x)[0].sum().backward()
    (second,) = given
    assert x.grad.tolist() == [1, 1]
    if materializes:
        assert (second.tolist(), second.dtype) == ([0, 0], torch.float32)
    else:
        assert second is None


def test_results_without_gradients(lib):
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])

    pair = define(
        lib, "marked(Tensor x) -> (Tensor, Tensor, Tensor)",
        lambda x: (2 * x, x.clone(), x.argsort()), lambda ctx, grad, *_: 2 * grad, setup_context,
    )  # fmt: skip
    x = leaf(3)
    results = pair(x)
    assert [result.requires_grad for result in results] == [True, False, False]
    results[0].sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_keyword_only_inputs_and_defaults(lib):
    def setup_context(ctx, inputs, keyword_only_inputs, output):
        assert len(inputs) == 2
        ctx.factor = inputs[1] * keyword_only_inputs["by"]

    times = define(
        lib, "times(Tensor x, int count=3, *, float by=0.5) -> Tensor",
        lambda x, count=3, *, by=0.5: x * count * by, lambda ctx, grad: (ctx.factor * grad, None),
        setup_context,
    )  # fmt: skip
    x = leaf(2)
    (times(x) + times(x, 2, by=4.0)).sum().backward()
    assert x.grad.tolist() == [9.5, 9.5]


def make_exp(lib):
    """Define exp, which saves its result."""
    return define(
        lib, "exp(Tensor x) -> Tensor", torch.exp,
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        lambda ctx, inputs, output: ctx.save_for_backward(output),
    )  # fmt: skip


def test_a_saved_result_does_not_keep_itself_alive(lib):
    exp, x = make_exp(lib), leaf(3)
    assert torch.autograd.gradgradcheck(exp, x)
    result = exp(x)
    node = weakref.ref(result)
    del result
    gc.collect()
    assert node() is None


def test_saved_tensors_that_were_changed_or_freed(lib):
    exp, x = make_exp(lib), leaf(3)
    result = exp(x)
    with torch.no_grad():
        result.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
    total = exp(x).sum()
    total.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        total.backward()


def test_hooks_on_saved_tensors_and_checkpoints(lib):
    cube, x = make_cube(lib), leaf(3)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: saved.append(it) or it, lambda it: it):
        cube(x, 1.0).sum().backward()
    assert len(saved) == 1
    expected, x.grad = x.grad, None
    checkpoint(lambda x: cube(x, 1.0), x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, expected)


def test_setup_is_not_recorded(lib):
    def setup_context(ctx, inputs, output):
        ctx.largest = inputs[0].max()
        assert not ctx.largest.requires_grad

    scaled = define(
        lib, "scaled(Tensor x) -> Tensor", torch.clone, lambda ctx, grad: ctx.largest * grad,
        setup_context,
    )  # fmt: skip
    x = torch.tensor([1.0, 4.0], requires_grad=True)
    scaled(x).sum().backward()
    assert x.grad.tolist() == [4, 4]


def test_threads_share_a_backward_pass(lib):
    cube, x = make_cube(lib), leaf(64)
    total, found = cube(x, 2.0).sum(), []

    def differentiate():
        for _ in range(50):
            (gradient,) = torch.autograd.grad(total, x, retain_graph=True)
            found.append(torch.equal(gradient, expected))

    (expected,) = torch.autograd.grad(total, x, retain_graph=True)
    threads = [threading.Thread(target=differentiate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 200


def test_backward_passes_share_no_attributes(lib):
    def backward(ctx, grad):
        assert not hasattr(ctx, "seen")
        ctx.seen = True
        return ctx.by * grad

    scaled = define(
        lib, "f(Tensor x) -> Tensor", lambda x: 2 * x, backward,
        lambda ctx, inputs, output: setattr(ctx, "by", 2),
    )  # fmt: skip
    x = leaf(2)
    total = scaled(x).sum()
    total.backward(retain_graph=True)
    total.backward()
    assert x.grad.tolist() == [4, 4]


def test_compiled(lib):
    library.define("foo_formulas::triple", "(Tensor x, float by) -> Tensor", lib=lib)
    kernel = library.elementwise_kernel(lambda x, by: 3.0 * x * by)
    library.register_kernel("foo_formulas::triple", ("cpu", "foo"), kernel, lib=lib)
    library.register_autograd(
        "foo_formulas::triple",
        lambda ctx, grad: (3.0 * ctx.by * grad, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
        lib=lib,
    )
    compiled = torch.compile(lambda x: torch.ops.foo_formulas.triple(x, 2.0).sum(), fullgraph=True)
    x = leaf(3)
    compiled(x).backward()
    assert x.grad.tolist() == [6, 6, 6]


def test_compiled_backward_passes(lib):
    """Calls with different constants do not share a compiled backward pass."""
    cube = make_cube(lib)
    x = leaf(3)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        for by in (2.0, 2.0, 5.0):
            x.grad = None
            cube(x, by).sum().backward()
            torch.testing.assert_close(x.grad, 3 * by * x.detach() ** 2)


def test_exceptions_pass_unchanged(lib):
    class OwnError(Exception):
        pass

    def fail(*args, **keywords):
        raise OwnError("here")

    operator = define(lib, "f(Tensor x) -> Tensor", torch.clone, fail)
    with pytest.raises(OwnError, match="here"):
        operator(leaf(2)).sum().backward()
    other = define(lib, "g(Tensor x) -> Tensor", torch.clone, lambda ctx, grad: grad, fail)
    with pytest.raises(OwnError, match="here"):
        other(leaf(2))


GRADIENTS = {
    "too few": (lambda ctx, grad: grad, "a gradient or None for each input (x, by, others), got 1"),
    "too many": (
        lambda ctx, grad: (grad, None, None, grad),
        "a gradient or None for each input (x, by, others), got 4",
    ),
    "of a number": (
        lambda ctx, grad: (grad, 1.0, None),
        "None for by, which is not a tensor, got float",
    ),
    "a number": (lambda ctx, grad: (1.0, None, None), "a Tensor or None for x, got float"),
    "no list": (
        lambda ctx, grad: (grad, None, grad),
        "a list of 2 gradients (Tensor or None) for others, got Tensor",
    ),
    "a short list": (
        lambda ctx, grad: (grad, None, [grad]),
        "a list of 2 gradients (Tensor or None) for others, got [Tensor]",
    ),
}


@pytest.mark.parametrize("what", GRADIENTS)
def test_wrong_gradients_are_refused(lib, what):
    backward, message = GRADIENTS[what]
    operator = define(
        lib, "f(Tensor x, float by, Tensor[] others) -> Tensor", lambda x, by, o: x * by, backward
    )
    x = leaf(2)
    message = re.escape(f"foo_formulas::f: backward must return {message}")
    with pytest.raises(RuntimeError, match=message):
        operator(x, 2.0, [x, x]).sum().backward()


def test_more_nones_than_inputs_are_taken(lib):
    operator = define(lib, "f(Tensor x) -> Tensor", torch.clone, lambda ctx, grad: (grad, None))
    x = leaf(2)
    operator(x).sum().backward()
    assert x.grad.tolist() == [1, 1]


def test_only_tensors_are_saved(lib):
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    scaled = define(
        lib, "scaled(Tensor x, float by) -> Tensor", lambda x, by: x * by,
        lambda ctx, grad: (grad, None), setup_context,
    )  # fmt: skip
    message = (
        r"\Afoo_formulas::scaled: save_for_backward must be given tensors or None, got float\Z"
    )
    with pytest.raises(TypeError, match=message):
        scaled(torch.ones(2, requires_grad=True), 2.0)


def test_what_is_no_formula_is_refused(lib):
    lib.define("same(Tensor x) -> Tensor")
    message = (
        r"\Afoo_formulas::same: backward must be the name of an operator, or a function, got 5\Z"
    )
    with pytest.raises(TypeError, match=message):
        library.register_autograd("foo_formulas::same", 5, lib=lib)


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_types_of_tensors_are_those_of_python(lib, device):
    """They are integers in C++, where calls are recorded."""
    seen = []

    def setup_context(ctx, inputs, output):
        seen.append(inputs[1:])

    def backward(ctx, grad):
        return grad, None, None, None

    typed = define(
        lib,
        "typed(Tensor x, ScalarType dtype, Layout? layout=None, MemoryFormat? format=None) "
        "-> Tensor",
        lambda x, dtype, layout=None, format=None: x.clone(),
        backward,
        setup_context,
    )
    typed(leaf(2, device=device), torch.float16, torch.strided, torch.channels_last)
    typed(leaf(2, device=device), torch.complex64)
    assert seen == [
        (torch.float16, torch.strided, torch.channels_last),
        (torch.complex64, None, None),
    ]
