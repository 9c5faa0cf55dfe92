"""Python functions that return too many or too few results, where PyTorch reads other memory."""

import functools

import pytest
import torch

from foo_ops import library

NAMESPACE = "foo_python_results"
PAIR = "(Tensor x) -> (Tensor, Tensor)"

RESULTS = {
    "0": lambda x: (),
    "1 (Tensor)": lambda x: (x + 1,),
    "3 (Tensor, Tensor, Tensor)": lambda x: (x + 1, x + 2, x + 3),
    "2 (Tensor, int)": lambda x: (x + 1, 5),
    "Tensor": lambda x: x + 1,
    "None": lambda x: None,
}


def message(name, what, got):
    return rf"\A{NAMESPACE}::{name}: its {what} must return 2 Tensors, got {got}\Z".replace(
        "(", r"\("
    ).replace(")", r"\)")


@pytest.fixture
def lib():
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as lib:
        yield lib


@pytest.mark.parametrize("device", ["cpu", "foo", "meta"])
@pytest.mark.parametrize("got", RESULTS)
def test_fake_kernels(lib, device, got):
    lib.define(f"fake{PAIR}")
    name = f"{NAMESPACE}::fake"
    library.register_fake(name, RESULTS[got], lib=lib)
    kernel = library.tile_kernel(lambda x, one, other, tiles: None)
    library.register_kernel(name, ("cpu", "foo"), kernel, lib=lib)
    with pytest.raises(TypeError, match=message("fake", "fake kernel", got)):
        torch.ops.foo_python_results.fake(torch.ones(2, device=device))


@pytest.mark.parametrize("got", RESULTS)
@pytest.mark.parametrize("register", ["register_kernel", "impl", "Library.impl"])
def test_kernels(lib, register, got):
    lib.define(f"kernel{PAIR}")
    name = f"{NAMESPACE}::kernel"
    if register == "register_kernel":
        library.register_kernel(name, "cpu", RESULTS[got], lib=lib)
    elif register == "impl":
        library.impl(name, "cpu", RESULTS[got], lib=lib)
    else:
        own = library.Library(NAMESPACE, "FRAGMENT")
        own.impl("kernel", RESULTS[got], "CPU")
        lib._registration_handles.append(own)
    with pytest.raises(TypeError, match=message("kernel", "kernel", got)):
        torch.ops.foo_python_results.kernel(torch.ones(2))
    if register == "Library.impl":
        own._destroy()
        lib._registration_handles.remove(own)


def pushed_forward(operator, x):
    torch.func.jvp(operator, (x,), (x,))


def differentiated(operator, x):
    operator(x.requires_grad_())[0].sum().backward()


@pytest.mark.parametrize("got", RESULTS)
@pytest.mark.parametrize("use", [pushed_forward, differentiated])
def test_composites(lib, use, got):
    lib.define(f"composite{PAIR}")
    name = f"{NAMESPACE}::composite"
    library.register_kernel(name, "cpu", lambda x: (x + 1, x + 2), lib=lib)
    library.register_autograd(name, composite=RESULTS[got], lib=lib)
    with pytest.raises(TypeError, match=message("composite", "composite", got)):
        use(torch.ops.foo_python_results.composite, torch.ones(2))


@pytest.mark.parametrize(
    ("schema", "result", "wanted"),
    [
        ("(Tensor x) -> Tensor", lambda x: (x, x), r"a Tensor, got 2 \(Tensor, Tensor\)"),
        ("(Tensor x) -> Tensor", lambda x: 5, "a Tensor, got int"),
        ("(Tensor(a!) x) -> ()", lambda x: x, "None, got Tensor"),
        ("(Tensor x) -> (Tensor, int)", lambda x: (x,), r"2 results, got 1 \(Tensor\)"),
    ],
)
def test_other_schemas(lib, schema, result, wanted):
    lib.define(f"other{schema}")
    library.register_kernel(f"{NAMESPACE}::other", "cpu", result, lib=lib)
    with pytest.raises(
        TypeError, match=rf"\A{NAMESPACE}::other: its kernel must return {wanted}\Z"
    ):
        torch.ops.foo_python_results.other(torch.ones(2))


@pytest.mark.parametrize(
    ("schema", "result"),
    [
        ("(Tensor x) -> int", lambda x: 5),
        ("(Tensor x) -> Tensor[]", lambda x: [x + 1, x + 2]),
        ("(Tensor x) -> (Tensor, int)", lambda x: [x + 1, 5]),
        ("(Tensor x) -> (Tensor?, Tensor)", lambda x: (None, x + 1)),
        ("(Tensor(a!) x) -> ()", lambda x: None),
    ],
)
def test_right_results_pass(lib, schema, result):
    lib.define(f"right{schema}")
    library.register_kernel(f"{NAMESPACE}::right", "cpu", result, lib=lib)
    x = torch.ones(2)
    found, wanted = torch.ops.foo_python_results.right(x), result(x)
    for one, other in zip(
        torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted)
    ):
        assert type(one) is type(other)


@pytest.mark.parametrize("kind", ["partial", "object"])
def test_other_callables(lib, kind):
    class Kernel:
        def __call__(self, x):
            return (x,)

    function = functools.partial(lambda y, x: (x,), 5) if kind == "partial" else Kernel()
    lib.define(f"callable{PAIR}")
    library.register_kernel(f"{NAMESPACE}::callable", "cpu", function, lib=lib)
    with pytest.raises(TypeError, match=message("callable", "kernel", "1 (Tensor)")):
        torch.ops.foo_python_results.callable(torch.ones(2))


def test_a_kernel_that_comes_before_its_operator(lib):
    own = library.Library(NAMESPACE, "IMPL")
    own.impl("later", lambda x: (x + 1, x + 2), "CPU")
    lib.define(f"later{PAIR}")
    found = torch.ops.foo_python_results.later(torch.ones(2))
    assert [it.tolist() for it in found] == [[2.0, 2.0], [3.0, 3.0]]
    own._destroy()


def test_a_fake_kernel_of_torch_that_returns_too_little(lib):
    lib.define(f"of_torch{PAIR}")
    name = f"{NAMESPACE}::of_torch"
    torch.library.register_fake(name, lambda x: (torch.empty_like(x),), lib=lib)
    kernel = library.tile_kernel(lambda x, one, other, tiles: None)
    library.register_kernel(name, "cpu", kernel, lib=lib)
    wanted = rf"\A{name}: its fake kernel must return 2 results, got 1\Z"
    with pytest.raises(TypeError, match=wanted):
        torch.ops.foo_python_results.of_torch(torch.ones(2))
