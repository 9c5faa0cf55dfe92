"""Modules may have a child, a parameter or a buffer named foo, as without foo_ops.

torch generates a method of that name for nn.Module, and ``import torch`` loads foo_ops: programs
that do not use foo must not notice.
"""

import copy
import io
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.foo = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.foo(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.foo = nn.Sequential(nn.Linear(2, 3), nn.Sequential(OrderedDict(foo=nn.Linear(3, 2))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.foo(x)


class OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.foo = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.foo * x


class OwnBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("foo", torch.full((2,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.foo + x


MODULES = [Child, Nested, OwnParameter, OwnBuffer]
parametrize_modules = pytest.mark.parametrize("kind", MODULES)


def member_of(module: nn.Module) -> object:
    names = [*module._modules, *module._parameters, *module._buffers]
    assert names == ["foo"]
    return {**module._modules, **module._parameters, **module._buffers}["foo"]


def test_containers_take_a_child_of_that_name() -> None:
    linear, parameter = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    modules = nn.ModuleDict({"foo": linear})
    assert modules["foo"] is modules.foo is linear
    assert modules.pop("foo") is linear
    assert callable(modules.foo)
    modules.update({"foo": linear})
    assert list(modules.named_children()) == [("foo", linear)]

    parameters = nn.ParameterDict({"foo": parameter})
    assert parameters["foo"] is parameters.foo is parameter
    assert dict(parameters.items()) == {"foo": parameter}
    del parameters["foo"]
    assert list(parameters.parameters()) == []
    parameters["foo"] = 3
    assert parameters["foo"] == parameters.foo == 3

    sequence = nn.Sequential(OrderedDict(foo=linear))
    assert sequence.foo is sequence[0] is linear


def test_members_are_registered_by_each_method() -> None:
    linear = nn.Linear(1, 1)
    for method in ("add_module", "register_module"):
        module = nn.Module()
        getattr(module, method)("foo", linear)
        assert module.foo is linear is module.get_submodule("foo")

    module = nn.Module()
    module.register_parameter("foo", nn.Parameter(torch.ones(1)))
    assert module.get_parameter("foo") is module.foo
    del module.foo
    module.register_buffer("foo", None)
    assert module.foo is None
    module.foo = torch.ones(1)
    assert module.get_buffer("foo") is module.foo
    del module.foo
    module.foo = nn.Buffer(torch.ones(1), persistent=False)
    assert not module.state_dict()
    module.foo = linear  # replaces the child
    assert module.foo is linear
    assert not module._buffers


def test_a_name_that_the_program_took_is_refused_as_ever() -> None:
    module = nn.Module()
    module.foo = 3
    with pytest.raises(KeyError, match="attribute 'foo' already exists"):
        module.add_module("foo", nn.Linear(1, 1))
    del module.foo
    module.foo = nn.Linear(1, 1)
    with pytest.raises(KeyError, match="attribute 'foo' already exists"):
        module.register_buffer("foo", torch.ones(1))

    class HasMethod(nn.Module):
        def foo(self) -> int:
            return 7

    assert HasMethod().foo() == 7
    with pytest.raises(KeyError, match="attribute 'foo' already exists"):
        HasMethod().register_parameter("foo", nn.Parameter(torch.ones(1)))


def test_nothing_of_that_name_is_an_error_as_ever() -> None:
    module = nn.Linear(1, 1)
    with pytest.raises(AttributeError, match="Linear has no attribute `foo`"):
        module.get_submodule("foo")
    with pytest.raises(AttributeError, match="Linear has no attribute `foo`"):
        module.get_parameter("foo")
    with pytest.raises(AttributeError, match="cannot assign buffer before"):
        nn.Module.__new__(nn.Module).register_buffer("foo", torch.ones(1))


def test_the_method_moves_to_foo() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    assert module.foo() is module
    assert module[0].weight.is_foo
    assert getattr(module.cpu(), "foo")(1)[0].weight.device == torch.device("foo:1")  # noqa: B009
    assert hasattr(module, "foo")
    assert nn.Module.foo(nn.Linear(1, 1)).weight.is_foo
    assert torch.jit.script(nn.Linear(1, 1)).foo().weight.is_foo


@parametrize_modules
def test_a_member_hides_the_method_and_moves_by_to(kind: type[nn.Module]) -> None:
    module = kind()
    assert module.foo is member_of(module)
    module.to("foo")
    assert all(tensor.is_foo for tensor in module.state_dict().values())


@parametrize_modules
def test_states_and_copies(kind: type[nn.Module]) -> None:
    module, other = kind(), kind()
    state = module.state_dict()
    assert all(name.split(".")[0] == "foo" for name in state)
    assert other.load_state_dict(state)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    x = torch.rand(4, 2)
    loaded = torch.load(file, weights_only=False)
    for same in (other, copy.copy(module), copy.deepcopy(module), loaded,
                 pickle.loads(pickle.dumps(module))):  # fmt: skip
        assert same.foo is member_of(same)
        assert torch.equal(same(x), module(x))


@parametrize_modules
def test_functional_call(kind: type[nn.Module]) -> None:
    module, x = kind(), torch.rand(4, 2)
    zeros = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    expected = torch.zeros_like(module(x)) if kind is not OwnBuffer else x
    assert torch.equal(torch.func.functional_call(module, zeros, (x,)), expected)
    assert module.foo is member_of(module)


@parametrize_modules
def test_scripts(kind: type[nn.Module]) -> None:
    module, x = kind(), torch.rand(4, 2)
    scripted = torch.jit.script(module)
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    for each in (scripted, torch.jit.trace(module, x), torch.jit.load(file)):
        assert torch.equal(each(x), module(x))
        assert each.state_dict().keys() == module.state_dict().keys()
        assert not isinstance(each.foo, type(module.eval))


def test_a_script_may_have_a_method_of_that_name() -> None:
    class HasMethod(nn.Module):
        @torch.jit.export
        def foo(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.foo(x)

    assert torch.jit.script(HasMethod()).foo(torch.ones(1)).tolist() == [2]


@parametrize_modules
def test_graphs(kind: type[nn.Module]) -> None:
    module, x = kind(), torch.rand(4, 2)
    traced = torch.fx.symbolic_trace(module)
    exported = torch.export.export(module, (x,))
    for each in (
        traced,
        copy.deepcopy(traced),
        exported.module(),
        torch.export.unflatten(exported),
    ):
        assert torch.equal(each(x), module(x))
        assert all(name.split(".")[0] == "foo" for name in each.state_dict())


@parametrize_modules
def test_compiled(kind: type[nn.Module]) -> None:
    module, x = kind(), torch.rand(4, 2)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))
    assert compiled.foo is module.foo


def test_compiled_constructor() -> None:
    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        module = nn.ModuleDict({"foo": nn.Identity()})
        return module["foo"](x) + 1

    assert function(torch.ones(1)).tolist() == [2]


def test_modules_that_look_names_up_elsewhere() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> object:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    inner = Child()
    assert Wrapper(inner).foo is inner.foo
    wrapper = Wrapper(nn.Linear(1, 1))
    assert wrapper.foo() is wrapper
    assert wrapper.inner.weight.is_foo


def test_parametrizations_and_lazy_modules() -> None:
    module = OwnParameter()
    nn.utils.parametrize.register_parametrization(module, "foo", nn.Identity())
    assert torch.equal(module.foo, torch.ones(2))
    nn.utils.parametrize.remove_parametrizations(module, "foo")
    assert module.foo is member_of(module)
    lazy = nn.Sequential(OrderedDict(foo=nn.LazyLinear(3)))
    lazy(torch.ones(1, 2))
    assert lazy.foo.weight.shape == (3, 2)
