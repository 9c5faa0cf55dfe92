"""foo_ops.library has the names of torch.library, with its semantics, on cpu and foo."""

import itertools
import math
import re
import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from foo_ops import library

serial = itertools.count()

HANDED_THROUGH = ("fallthrough_kernel", "get_ctx", "infer_schema", "wrap_triton")


@pytest.fixture
def lib():
    """Provide a library per test, and destroy it afterwards."""
    lib = library.Library(f"foo_lib{next(serial)}", "DEF")
    yield lib
    lib._destroy()


def call(lib, name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, lib.ns), packet), overload or "default")


def double(x):
    return x + x


def test_every_name_of_torch_library_is_there():
    assert set(torch.library.__all__) <= set(library.__all__)
    for name in HANDED_THROUGH:
        assert getattr(library, name) is getattr(torch.library, name)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("OTHER", "Unsupported kind: OTHER"), ("DEF", "prim is a reserved namespace")],
)
def test_library_kinds(kind, message):
    with pytest.raises(ValueError, match=message):
        library.Library("prim", kind)


def test_library_of_each_kind(lib, device):
    lib.define("f(Tensor x) -> Tensor")
    fragment = library.Library(lib.ns, "FRAGMENT")
    fragment.define("g(Tensor x) -> Tensor")
    key = "CPU" if device == "cpu" else "PrivateUse1"
    implementation = library.Library(lib.ns, "IMPL", key)
    implementation.impl("f", double)
    implementation.impl("g", double, key)
    x = torch.ones(3, device=device)
    assert call(lib, "f")(x).tolist() == call(lib, "g")(x).tolist() == [2, 2, 2]
    fragment._destroy()
    implementation._destroy()


@pytest.mark.parametrize(
    ("name", "schema", "error", "message"),
    [
        ("f", "(Tensor x) -> Tensor", ValueError, "namespace"),
        ("foo_lib::f", "(Tensor x -> Tensor", ValueError, "expected schema to look like e.g."),
        ("foo_lib::f", "Tensor x", ValueError, "expected schema to look like e.g."),
        ("foo_lib::f", "(Tenso x) -> Tensor", RuntimeError, "Unknown type specifier|unknown type"),
        (3, "(Tensor x) -> Tensor", ValueError, "expected qualname to be instance of str"),
    ],
)
def test_malformed_schemas_and_names(name, schema, error, message):
    with pytest.raises(error, match=message):
        library.define(name, schema)


def test_define_with_a_library_and_tags(lib):
    library.define(f"{lib.ns}::f", "(Tensor x) -> Tensor", lib=lib, tags=torch.Tag.pointwise)
    assert torch.Tag.pointwise in call(lib, "f").tags
    with pytest.raises(RuntimeError, match="multiple times"):
        library.define(f"{lib.ns}::f", "(Tensor x) -> Tensor", lib=lib)


@pytest.mark.parametrize("types", ["foo", ("cpu", "foo"), "default", "PrivateUse1"], ids=str)
def test_impl_for_foo(lib, types):
    lib.define("f(Tensor x) -> Tensor")
    library.impl(f"{lib.ns}::f", types, double, lib=lib)
    assert call(lib, "f")(torch.ones(2, device="foo")).tolist() == [2, 2]


def test_impl_as_a_decorator_and_in_older_code(lib):
    lib.define("f(Tensor x) -> Tensor")
    lib.define("g(Tensor x) -> Tensor")

    @library.impl(f"{lib.ns}::f", "foo", lib=lib)
    def f(x):
        return x + 1

    @library.impl(lib, "g", "PrivateUse1")
    def g(x):
        return x + 2

    x = torch.zeros(2, device="foo")
    assert call(lib, "f")(x).tolist() == [1, 1]
    assert call(lib, "g")(x).tolist() == [2, 2]


KERNEL = library.elementwise_kernel(lambda x: 3 * x)


@pytest.mark.parametrize("way", ["register_kernel", "impl", "legacy impl", "Library.impl"])
def test_kernel_wherever_a_function_is_taken(lib, way, device):
    lib.define("f(Tensor x) -> Tensor")
    key = "CPU" if device == "cpu" else "PrivateUse1"
    if way == "register_kernel":
        library.register_kernel(call(lib, "f"), device, KERNEL, lib=lib)
    elif way == "impl":
        assert library.impl(f"{lib.ns}::f", device, lib=lib)(KERNEL) is None
    elif way == "legacy impl":
        assert library.impl(lib, "f", key)(KERNEL) is KERNEL
    else:
        lib.impl("f", KERNEL, key)
    x = torch.ones(2, dtype=torch.bfloat16, device=device)
    assert call(lib, "f")(x).tolist() == [3, 3]
    other = "foo" if device == "cpu" else "cpu"
    if device == "cpu":
        # Without a kernel for foo, an operator runs the CPU's.
        assert call(lib, "f")(x.to(other)).tolist() == [3, 3]
    else:
        with pytest.raises(NotImplementedError, match="Could not run"):
            call(lib, "f")(x.to(other))


def test_register_kernel_of_a_function(lib, device):
    lib.define("f(Tensor x) -> Tensor")

    @library.register_kernel(f"{lib.ns}::f", device, lib=lib)
    def f(x):
        return x * 5

    assert call(lib, "f")(torch.ones(2, device=device)).tolist() == [5, 5]


def test_fallthrough_kernel(lib, device):
    lib.define("f(Tensor x) -> Tensor")
    library.impl(f"{lib.ns}::f", device, double, lib=lib)
    key = "AutocastCPU" if device == "cpu" else "AutocastPrivateUse1"
    lib.impl("f", library.fallthrough_kernel, key)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert call(lib, "f")(torch.ones(2, device=device)).dtype == torch.float32


def nonzero_of(lib):
    lib.define("nonzero(Tensor x) -> Tensor")
    library.impl(
        f"{lib.ns}::nonzero", ("cpu", "foo"), lambda x: torch.nonzero(x).contiguous(), lib=lib
    )

    @library.register_fake(f"{lib.ns}::nonzero", lib=lib)
    def fake(x):
        count = library.get_ctx().new_dynamic_size()
        return x.new_empty((count, x.dim()), dtype=torch.int64)

    return call(lib, "nonzero")


def test_data_dependent_shape(lib, device):
    nonzero = nonzero_of(lib)
    x = torch.tensor([[1.0, 0.0], [2.0, 3.0]], device=device)
    graph = make_fx(lambda x: nonzero(x) + 1, tracing_mode="symbolic")(x)
    for changed in (x, x * 0, x + 1):
        assert torch.equal(graph(changed), torch.nonzero(changed) + 1)
    results = library.opcheck(nonzero, (x,))
    assert results == dict.fromkeys(results, "SUCCESS")


def test_dynamic_size_of_a_meta_tensor(lib):
    with pytest.raises(RuntimeError, match="trying to run this operator with meta Tensors"):
        nonzero_of(lib)(torch.ones(3, device="meta"))


def test_impl_abstract_warns_that_it_is_the_old_name(lib):
    lib.define("f(Tensor x) -> Tensor")
    with pytest.warns(FutureWarning, match=r"was renamed to `torch.library.register_fake`"):
        library.impl_abstract(f"{lib.ns}::f", lambda x: torch.empty_like(x), lib=lib)
    assert call(lib, "f")(torch.ones(3, device="meta")).shape == (3,)


def test_fake_kernel_of_a_c_operator_must_sit_in_its_module(monkeypatch):
    """PyTorch's quantized operators are written in C++ and declare a module."""
    operator = torch.ops.quantized.relu6.default
    declared, _ = torch._C._dispatch_pystub("quantized::relu6", "")
    input = torch.ones(3, device="meta")
    lib = library.Library("quantized", "FRAGMENT")
    library.register_fake(operator, lambda input, inplace=False: torch.empty_like(input), lib=lib)
    message = f"is in the Python module '{declared}' but it was actually found in '{__name__}'"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        operator(input, False)
    lib._destroy()
    # Pretend that this module is the declared one.
    lib = library.Library("quantized", "FRAGMENT")
    monkeypatch.setitem(globals(), "__name__", declared)
    library.register_fake(operator, lambda input, inplace=False: torch.empty_like(input), lib=lib)
    assert operator(input, False).shape == (3,)
    lib._destroy()


def times(lib, device_types=("cpu", "foo")):
    """Define x * factor with a gradient for x, and count the calls of its Python functions."""
    counts = {"setup": 0, "backward": 0}
    lib.define("times(Tensor x, *, float factor=2.0) -> Tensor")
    name = f"{lib.ns}::times"
    kernel = library.elementwise_kernel(lambda x, factor: x * factor)
    library.register_kernel(name, device_types, kernel, lib=lib)

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        counts["setup"] += 1
        ctx.factor = keyword_only_inputs["factor"]

    def backward(ctx, grad):
        counts["backward"] += 1
        return grad * ctx.factor

    library.register_autograd(name, backward, setup_context=setup_context, lib=lib)
    return call(lib, "times"), counts


def test_autograd_with_keyword_only_arguments(lib, device):
    operator, counts = times(lib)
    x = torch.randn(3, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: operator(x, factor=-3.0), x)
    before = dict(counts)
    with torch.no_grad():
        operator(x)
    operator(x.detach())
    assert counts == before
    operator(x)
    assert counts["setup"] == before["setup"] + 1


def test_autograd_of_schemas_that_are_not_functional(lib):
    lib.define("f(Tensor(a!) x) -> ()")
    with pytest.raises(RuntimeError, match="f: an operator with a formula must write to no arg"):
        library.register_autograd(f"{lib.ns}::f", lambda ctx: None, lib=lib)
    lib.define("h(Tensor x, *, Tensor y) -> Tensor")
    with pytest.raises(NotImplementedError, match="must not have keyword-only tensors, got y"):
        library.register_autograd(f"{lib.ns}::h", lambda ctx, grad: None, lib=lib)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_autocast(lib, dtype, device):
    operator, _ = times(lib)
    library.register_autocast(operator, device, dtype, lib=lib)
    x = torch.ones(3, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert operator(x, factor=3.0).dtype == (dtype or torch.bfloat16)
        assert operator(x.double()).dtype == torch.float64
    assert operator(x).dtype == torch.float32


def test_autocast_leaves_arguments_as_they_are(lib, device):
    lib.define("scaled(Tensor x, Tensor scale) -> Tensor")
    operator, key = call(lib, "scaled"), "CPU" if device == "cpu" else "PrivateUse1"
    seen = []

    def scaled(x, scale):
        seen.append((x.dtype, scale.dtype))
        return x * scale.to(x.dtype)

    library.impl(f"{lib.ns}::scaled", key, scaled, lib=lib)
    library.register_autocast(operator, uncast=("scale",), lib=lib)
    tensors = {"x": torch.ones(3, device=device), "scale": torch.ones(3, device=device)}
    with torch.autocast(device, dtype=torch.bfloat16):
        operator(*tensors.values())
        operator(**tensors)
    assert seen == [(torch.bfloat16, torch.float32)] * 2
    message = "^register_autocast: uncast must have arguments of .*::scaled, got factor$"
    with pytest.raises(ValueError, match=message):
        library.register_autocast(operator, uncast=("factor",), lib=lib)


def test_autocast_asks_a_function_which_arguments_stay(lib):
    lib.define("scaled(Tensor x, Tensor scale) -> Tensor")
    operator, seen = call(lib, "scaled"), []

    def scaled(x, scale):
        seen.append((x.dtype, scale.dtype))
        return x * scale.to(x.dtype)

    def uncast(x, scale):
        return ["scale"] if len(scale) == 3 else []

    library.impl(f"{lib.ns}::scaled", "CPU", scaled, lib=lib)
    library.register_autocast(operator, uncast=uncast, lib=lib)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        operator(torch.ones(3), torch.ones(3))
        operator(torch.ones(3), scale=torch.ones(1))
    assert seen == [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


def test_autocast_of_a_device_that_has_none(lib):
    operator, _ = times(lib)
    with pytest.raises(ValueError, match="Device type 'meta' does not support autocast"):
        library.register_autocast(operator, "meta", torch.float16, lib=lib)


def test_vmap(lib, device):
    operator, _ = times(lib)

    @library.register_vmap(f"{lib.ns}::times", lib=lib)
    def vmap(info, in_dims, x, *, factor=2.0):
        return operator(x, factor=factor), in_dims[0]

    x = torch.arange(12.0, device=device).view(3, 4)
    assert torch.equal(torch.vmap(operator, in_dims=1, out_dims=1)(x), 2 * x)


@pytest.mark.parametrize("register", [torch.library.register_vmap, library.register_vmap])
def test_a_rule_in_place_of_a_kernels(lib, device, register):
    """Registering another rule replaces the kernel's own, without a warning."""
    lib.define("negative(Tensor input) -> Tensor")
    kernel = library.elementwise_kernel(lambda x: -x)
    library.register_kernel(f"{lib.ns}::negative", ("cpu", "foo"), kernel, lib=lib)
    operator, x = getattr(torch.ops, lib.ns).negative.default, torch.ones(2, 3, device=device)
    assert torch.equal(torch.vmap(operator)(x), -x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.set_warn_always(True)  # PyTorch warns only once per process about a replaced kernel.
        try:
            register(operator.name(), lambda info, dims, x: (operator(x) - 1, dims[0]), lib=lib)
        finally:
            torch.set_warn_always(False)
    assert torch.equal(torch.vmap(operator)(x), -x - 1)
    assert torch.equal(operator(x), -x)


def test_get_kernel(lib, device):
    operator, _ = times(lib)
    key = "CPU" if device == "cpu" else "PrivateUse1"
    kernel = library.get_kernel(operator, key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    x = torch.ones(2, device=device)
    assert kernel.call_boxed(keys, x, factor=4.0).tolist() == [4, 4]
    with pytest.raises(ValueError, match="Invalid dispatch key: Nothing"):
        library.get_kernel(operator, "Nothing")


def test_infer_schema():
    def f(x: torch.Tensor, y: float | None = None) -> torch.Tensor:
        return x

    assert library.infer_schema(f, mutates_args={"x"}) == (
        "(Tensor(a0!) x, float? y=None) -> Tensor"
    )


def test_opcheck_gives_a_dict(lib, device):
    """A wrong fake kernel is reported, and the other checks run."""
    lib.define("f(Tensor x) -> Tensor")
    library.impl(f"{lib.ns}::f", ("cpu", "foo"), double, lib=lib)
    library.register_fake(f"{lib.ns}::f", lambda x: x.new_empty(x.shape[0] + 1), lib=lib)
    x = torch.ones(3, device=device)
    results = library.opcheck(call(lib, "f"), (x,), raise_exception=False)
    assert set(results) == set(library.OPCHECKS)
    assert results["test_schema"] == "SUCCESS"
    assert "are not equal" in str(results["test_faketensor"])
    with pytest.raises(Exception, match="test_faketensor failed"):
        library.opcheck(call(lib, "f"), (x,))
    assert library.opcheck(call(lib, "f")._overloadpacket, (x,), test_utils="test_schema") == {
        "test_schema": "SUCCESS"
    }


def test_kernel_of_an_operator_that_is_destroyed_and_defined_again(device):
    for factor in (2, 3):
        lib = library.Library("foo_lib_again", "DEF")
        lib.define("f(Tensor x) -> Tensor")
        kernel = library.elementwise_kernel(scaled_by(factor))
        library.register_kernel("foo_lib_again::f", device, kernel, lib=lib)
        assert call(lib, "f")(torch.ones(1, device=device)).item() == factor
        lib._destroy()


def scaled_by(factor):
    return lambda x: x * factor + math.floor(0.5)
