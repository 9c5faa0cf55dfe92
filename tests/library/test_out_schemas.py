"""Registration decides which schemas `f.out` and optional arguments may have."""

import itertools
import re

import pytest

from foo_ops import library

ARGUMENTS = "Tensor input, Tensor weight"
serial = itertools.count()


@pytest.fixture(scope="module")
def lib():
    return library.Library("foo_schemas", "FRAGMENT")


@pytest.mark.parametrize(
    "schema",
    [
        "(Tensor input, *, Tensor(a!) out) -> Tensor(a!)",
        f"({ARGUMENTS}, *, Tensor(a!) out, Tensor(b!) more) -> (Tensor(a!), Tensor(b!))",
        "(Tensor input, Tensor? weight, *, Tensor(a!) out) -> Tensor(a!)",
    ],
)
def test_out_that_does_not_match_the_functional_operator(lib, schema):
    name = f"unlike{next(serial)}"
    lib.define(f"{name}({ARGUMENTS}) -> Tensor")
    lib.define(f"{name}.out{schema}")
    functions = {
        2: lambda a, b, rows: None,
        3: lambda a, b, c, rows: None,
        4: lambda a, b, c, d, rows: None,
    }
    kernel = library.tile_kernel(functions[schema.partition("->")[0].count("Tensor")])
    message = (
        f"foo_schemas::{name}.out: it must take the arguments of foo_schemas::{name}, and then an "
        f"out for each result: foo_schemas::{name}({ARGUMENTS}) -> Tensor, got foo_schemas::{name}"
    )
    with pytest.raises(TypeError, match=rf"\A{re.escape(message)}"):
        library.register_kernel(f"foo_schemas::{name}.out", "cpu", kernel, lib=lib)


def test_optional_argument_that_is_returned(lib):
    name = f"maybe{next(serial)}_"
    lib.define(f"{name}(Tensor x, Tensor(a!)? y=None) -> Tensor(a!)")
    message = f"foo_schemas::{name}: an argument that is written and returned must not be optional"
    for kernel in (
        library.elementwise_kernel(lambda x, y: x),
        library.tile_kernel(lambda x, y, rows: None),
    ):
        with pytest.raises(TypeError, match=rf"\A{re.escape(message)}, got y\Z"):
            library.register_kernel(f"foo_schemas::{name}", "cpu", kernel, lib=lib)
