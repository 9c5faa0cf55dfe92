"""Uses the operators for the first time in many ways, each in a fork that has not used them.

``python first_uses.py FOLDER`` writes the files that are loaded, and ``python first_uses.py FOLDER
run`` prints which ways failed.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
from support.forked import failures, in_threads
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import rms_norm

FOLDER = Path(sys.argv[1])
X = torch.tensor([-1.0, 2.0])


def both(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.foo.rms_norm(torch.ops.foo.abs(x)) * 2


class Both(torch.nn.Module):
    def forward(self, x):
        return both(x)


def write():
    torch.jit.save(torch.jit.script(both), str(FOLDER / "scripted.pt"))
    torch.export.save(torch.export.export(Both(), (X,)), FOLDER / "exported.pt2")
    torch.save(torch.fx.symbolic_trace(Both()), FOLDER / "traced.pt")


def expected(x):
    return 2 * rms_norm(x.abs(), (2,), eps=1e-6)


def is_cold():
    return "foo_ops.ops" not in sys.modules


def scripted():
    """Load a function that calls the operators from C++."""
    function = torch.jit.load(FOLDER / "scripted.pt")
    assert is_cold()
    return function


def gradient(function):
    x = X.clone().requires_grad_()
    function(x).sum().backward()
    return x.grad


def from_cpp():
    torch.testing.assert_close(scripted()(X), expected(X))
    assert not is_cold()


def from_cpp_on_foo():
    assert scripted()(X.to("foo")).device.type == "foo"


def from_cpp_in_inference_mode():
    with torch.inference_mode():
        torch.testing.assert_close(scripted()(X), expected(X))


def from_cpp_with_gradients():
    torch.testing.assert_close(gradient(scripted()), gradient(expected))


def from_cpp_with_gradients_of_functions():
    found = torch.func.grad(lambda x: scripted()(x).sum())(X)
    torch.testing.assert_close(found, gradient(expected))


def from_cpp_mapped():
    assert torch.vmap(scripted())(torch.stack([X, X])).shape == (2, 2)


def from_cpp_on_meta():
    assert scripted()(torch.empty(3, 4, device="meta")).shape == (3, 4)


def from_cpp_on_fakes():
    with FakeTensorMode():
        assert scripted()(torch.empty(3, 4)).shape == (3, 4)


def from_cpp_in_threads():
    function = scripted()
    in_threads(lambda: torch.testing.assert_close(gradient(function), gradient(expected)))


def by_name_in_threads():
    in_threads(
        lambda: torch.ops.foo.abs(X),
        lambda: gradient(torch.ops.foo.rms_norm.default),
        lambda: __import__("foo_ops").attention,
        lambda: __import__("foo_ops.ops"),
    )


def by_name():
    namespace, packet = torch.ops.foo, torch.ops.foo.abs
    assert torch.ops.foo is namespace
    assert torch.ops.foo.abs is packet
    assert type(namespace) is torch._ops._OpNamespace
    assert {"abs", "attention"} <= {*dir(namespace)} & {*namespace}
    assert not hasattr(namespace, "no_such")


def by_name_under_modes():
    with torch.device("meta"), torch.inference_mode(), FakeTensorMode():
        assert torch.ops.foo.abs(torch.empty(3)).shape == (3,)
    torch.testing.assert_close(gradient(both), gradient(expected))


def by_name_mapped():
    assert torch.vmap(torch.vmap(lambda x: torch.ops.foo.abs(x)))(X[None]).tolist() == [[1, 2]]


def compiled():
    function = torch.compile(both, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(function(X), expected(X))


def checked():
    torch.library.opcheck(torch.ops.foo.abs.default, (X.clone().requires_grad_(),))


def exported():
    program = torch.export.load(FOLDER / "exported.pt2")
    torch.testing.assert_close(program.module()(X), expected(X))


def traced():
    module = torch.load(FOLDER / "traced.pt", weights_only=False)
    torch.testing.assert_close(module(X), expected(X))


def known_to_cpp():
    assert torch._C._dispatch_has_kernel("foo::abs.out")
    assert torch._C._jit_get_schemas_for_operator("foo::attention")
    # Attributes that programs look up in any module.
    assert not any(hasattr(torch.ops.foo, name) for name in ("__self__", "__wrapped__", "__path__"))
    assert is_cold()


def attention_of_torch():
    query = torch.ones(1, 2, 4, 8, device="foo", requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    assert query.grad is not None


def flash_attention_of_the_cpu():
    torch.nn.attention.activate_flash_attention_impl("foo")
    query = torch.ones(1, 2, 4, 8, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    assert not is_cold()


def another_operator():
    import foo_ops

    foo_ops.library.define("foo::of_a_user", "(Tensor x) -> Tensor")
    try:
        torch.library.define("foo::abs", "(Tensor x) -> Tensor")
    except RuntimeError as error:
        assert "multiple times" in str(error)  # noqa: PT017
    else:
        raise AssertionError("it is defined twice")


def installed_anew():
    from foo_ops import _operators

    _operators._companion = os.stat(__file__)
    for use in (lambda: torch.ops.foo.abs, lambda: scripted()(X)):
        try:
            use()
        except (ImportError, RuntimeError) as error:
            assert "restart the process" in str(error)  # noqa: PT017
        else:
            raise AssertionError("it goes on")


WAYS = (
    *(from_cpp, from_cpp_on_foo, from_cpp_in_inference_mode, from_cpp_with_gradients),
    *(from_cpp_with_gradients_of_functions, from_cpp_mapped, from_cpp_on_meta, from_cpp_on_fakes),
    *(from_cpp_in_threads, by_name_in_threads, by_name, by_name_under_modes, by_name_mapped),
    *(compiled, checked, exported, traced, known_to_cpp, attention_of_torch),
    *(flash_attention_of_the_cpu, another_operator, installed_anew),
)


def main():
    if len(sys.argv) == 2:
        write()
        return
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    assert is_cold()
    print(failures(WAYS))


if __name__ == "__main__":
    main()
