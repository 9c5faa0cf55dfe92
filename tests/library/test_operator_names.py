"""Functions that take an operator's name refuse invalid ones, as decorators too."""

import inspect
import re

import pytest
import torch

from foo_ops import custom_ops, library

pytestmark = pytest.mark.filterwarnings("ignore:.*was renamed to:FutureWarning")

FIRST = ("op", "name", "names", "qualname")
"""Parameter names for an operator, or for its name."""
MODULES = {"library": library, "custom_ops": custom_ops}
FUNCTIONS = {
    f"{module}.{name}": value
    for module, within in MODULES.items()
    for name in within.__all__
    if inspect.isfunction(value := getattr(within, name))
}
# Functions that take functions, tensors or no argument.
OTHERS = {
    *("library.check_bounds", "library.elementwise_kernel", "library.fallthrough_kernel"),
    *("library.get_ctx", "library.infer_schema", "library.scratch", "library.tile_kernel"),
    *("library.have_sizes", "library.holds"),
    *("library.vmap_by_loop", "library.wrap_triton", "custom_ops.get_ctx"),
}
TAKES_NAME = {name: it for name, it in FUNCTIONS.items() if name not in OTHERS}
# Functions that define a new operator, so that any valid name will do.
DEFINES = {
    *("library.define", "library.custom_op", "library.triton_op", "library.numba_op"),
    "custom_ops.custom_op",
}
ARGUMENTS = {
    "args": (),
    "device_types": "cpu",
    "dispatch_key": "CPU",
    "mutates_args": (),
    "schema": "(Tensor x) -> Tensor",
    "torch_dispatch_class": torch.Tensor,
}
"""Values of the other parameters without a default."""

NO_NAMES = (
    *(3, None, b"foo::abs", ["foo::abs"], "", "abs", "foo::", "::x", "foo::abs::y", "foo::a b"),
    *("foo::abs.", "foo::.x", "foo::abs.out.x", "foo abs", torch.ops.foo.abs),
)
UNKNOWN = ("foo::no_such", "no_such::f", "foo::abs.no_such", "foo::abs.overloads", "foo::name")
FORM = "the name of an operator must have the form mylib::f or mylib::f.out, got {!r}"
NO_OPERATOR = "{}: there is no such operator; define it with foo_ops.library.define"
# Messages of torch's own, or for names that cannot have an overload.
WORDS = {
    "library.define": r".*(namespace|instance of str).*",
    "library.opcheck": r"opcheck\(op, \.\.\.\): op must be instance of torch\._ops\.OpOverload.*",
    "library.numba_op": r"numba_op: the name of the operator must have the form mylib::f, got .*",
    "custom_ops": (
        r"Expected there to be a namespace in .*|The torch\.custom_ops APIs do not handle overloads"
        r".*|Could not find the operator .*"
    ),
}


def call(name, operator):
    _, *others = inspect.signature(TAKES_NAME[name]).parameters.values()
    given = [it for it in others if it.default is it.empty and it.kind is not it.VAR_POSITIONAL]
    keywords = {it.name: ARGUMENTS[it.name] for it in given if it.kind is it.KEYWORD_ONLY}
    positional = [ARGUMENTS[it.name] for it in given if it.kind is not it.KEYWORD_ONLY]
    if name == "library.triton_op":
        positional = [lambda x: x]
    return TAKES_NAME[name](operator, *positional, **keywords)


def refused(name, operator, message):
    words = [re.escape(message.format(operator))]
    words += [WORDS[it] for it in (name, name.partition(".")[0]) if it in WORDS]
    with pytest.raises(ValueError, match=rf"(?s)\A({'|'.join(words)})\Z"):
        call(name, operator)


def test_every_function_is_known():
    """A new function takes the name first, or is listed in OTHERS."""
    firsts = {name: next(iter(inspect.signature(it).parameters)) for name, it in TAKES_NAME.items()}
    assert {name: first for name, first in firsts.items() if first not in FIRST} == {}
    assert FUNCTIONS.keys() >= OTHERS


@pytest.mark.parametrize("name", TAKES_NAME)
def test_what_is_no_name(name):
    for operator in NO_NAMES:
        if name == "library.opcheck" and isinstance(operator, torch._ops.OpOverloadPacket):
            continue
        refused(name, operator, FORM)


@pytest.mark.parametrize("name", sorted(TAKES_NAME.keys() - DEFINES))
def test_operators_that_are_not_there(name):
    for operator in UNKNOWN:
        if name != "custom_ops.destroy":
            refused(name, operator, NO_OPERATOR)
        elif "." not in operator:
            # The error of torch._custom_ops.
            with pytest.raises(RuntimeError, match="Could not find custom op"):
                call(name, operator)


def test_names_in_a_library():
    """In a Library, names need no namespace, and operators may be defined later."""
    lib = library.Library("foo_operator_names", "FRAGMENT")
    for name in (3, None, b"f", "", "f::", "f.out.x"):
        given = f"{lib.ns}::{name}" if isinstance(name, str) and "::" not in name else name
        for register in (
            lambda name=name: lib.impl(name, torch.neg, "CPU"),
            lambda name=name: library.impl(lib, name, "CPU"),
        ):
            with pytest.raises(ValueError, match=rf"\A{re.escape(FORM.format(given))}\Z"):
                register()
    lib.impl("later", torch.neg, "CPU")
    lib.define("later(Tensor x) -> Tensor")
    assert torch.ops.foo_operator_names.later(torch.ones(1)).item() == -1
    lib._destroy()


def test_operator_of_gradients():
    library.define("foo_operator_names::f", "(Tensor x) -> Tensor")
    for backward, message in (("f_backward", FORM), ("foo::no_such", NO_OPERATOR)):
        with pytest.raises(ValueError, match=re.escape(message.format(backward))):
            library.register_autograd("foo_operator_names::f", backward)


def test_operators_themselves():
    """Functions that take an operator in place of its name, as in torch.library."""

    @library.custom_op("foo_operator_names::custom", mutates_args=())
    def custom(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    for operator in (custom, custom._opoverload):
        library.register_fake(operator)(torch.empty_like)
        library.register_kernel(operator, "foo")(torch.clone)
        assert library.get_kernel(operator, "CPU") is not None
    x = torch.ones(2, device="foo")
    assert torch.equal(torch.ops.foo_operator_names.custom(x), x)
