"""A mistake in a user's kernel gives one message with the operator, the dtype and the line."""

import itertools
import math
import re

import pytest
import torch

from foo_ops import language, library

serial = itertools.count()


def operator(kernel, schema="(Tensor input) -> Tensor"):
    """Define a new operator with a kernel, and return its name."""
    name = f"foo_wrong::f{next(serial)}"
    library.define(name, schema)
    library.register_fake(name, lambda tensor, *args: torch.empty_like(tensor))
    library.register_kernel(name, ("cpu", "foo"), kernel)
    return getattr(torch.ops.foo_wrong, name.partition("::")[2]), name


def line(function, offset):
    """Return the file and line of a function's line ``offset``."""
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset}"


def helper(x):
    return x.nothing


def unknown_attribute(x):
    y = x + 1
    return y.wrong


def in_helper(x):
    return helper(x)


def unknown_name(x):
    return does_not_exist(x)  # noqa: F821


def text(x):
    return "text"


def two_values(x):
    return x, x


def either_pair(x):
    return (x, 1.0) if x > 0 else (1.0, x)


def raises(x):
    if x < 0:
        raise ValueError("negative")
    return x


def asserts(x):
    assert x > 0
    return x


def allocates(x):
    return [x, x][0]


def sometimes_nothing(x):
    return x if x > 0 else None


def calls_numba(x):
    return math.ldexp(x, 2)


def adds_text(x):
    return x + "text"


def imports(x):
    import math

    return math.exp(x)


def makes_text(x):
    y = x + 1
    return float(str(y))


def formats(x):
    return len(f"{x}") * x


def generator(x):
    yield x


def uses_generator(x):
    for y in generator(x):
        x = y
    return x


NO_TEXT = "No implementation of function Function(<class 'str'>) found for signature: str(float32)"

ELEMENTWISE = [
    (makes_text, NO_TEXT, 2, "return float(str(y))"),
    (formats, NO_TEXT, 1, 'return len(f"{x}") * x'),
    (uses_generator, "a kernel must not yield: generators are not supported", -3, "yield x"),
    (unknown_attribute, "Unknown attribute 'wrong' of type float32", 2, "return y.wrong"),
    (in_helper, "Unknown attribute 'nothing' of type float32", None, "return x.nothing"),
    (unknown_name, "NameError: name 'does_not_exist' is not defined", 0, "def unknown_name(x):"),
    (text, "the kernel must return numbers, got unicode_type", 1, 'return "text"'),
    (
        either_pair,
        "the kernel must return 1 value, one for each result, got 2",
        1,
        "return (x, 1.0) if x > 0 else (1.0, x)",
    ),
    (raises, "a kernel must not raise", 2, 'raise ValueError("negative")'),
    (asserts, "a kernel must not raise", 1, "assert x > 0"),
    (allocates, "a kernel must not allocate", 1, "return [x, x][0]"),
    (
        sometimes_nothing,
        "a function must return a value on every path or on none",
        0,
        "def sometimes_nothing(x):",
    ),
    (
        calls_numba,
        "a kernel must not allocate, raise or call Python, but this one calls numba_ldexpf",
        0,
        "def calls_numba(x):",
    ),
    (
        adds_text,
        "No implementation of function Function(<built-in function add>) found for signature: "
        "add(float32, Literal[str](text))",
        1,
        'return x + "text"',
    ),
    (imports, "Use of unsupported opcode (IMPORT_NAME) found.", 1, "import math"),
]


@pytest.mark.parametrize(
    ("function", "reason", "offset", "source"),
    ELEMENTWISE,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_elementwise_kernel_that_cannot_be_compiled(function, reason, offset, source, device):
    call, name = operator(library.elementwise_kernel(function))
    place = line(helper, 1) if offset is None else line(function, offset)
    message = f"{name}: its kernel cannot be compiled for float32: {reason} ({place}: {source})"
    input = torch.ones(3, device=device)
    # Twice: a failed compilation is not cached.
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"\A{re.escape(message)}\Z"):
            call(input)


def of_bits(input, output, rows):
    for row in rows:
        output.flat[row] = input.flat[row] & 3


def test_dtype_that_a_tile_kernel_does_not_fit():
    """The message names all dtypes, and the operator works for the dtypes that fit."""
    call, name = operator(library.tile_kernel(of_bits, tiles=lambda input: input.size))
    assert call(torch.arange(6)).tolist() == [0, 1, 2, 3, 0, 1]
    place = f"{line(of_bits, 2)}: output.flat[row] = input.flat[row] & 3"
    message = (
        f"{name}: its kernel cannot be compiled for bfloat16-1d,bfloat16-1d: No implementation of "
        "function Function(<built-in function and_>) found for signature: "
        f"and_(float32, Literal[int](3)) ({place})"
    )
    with pytest.raises(RuntimeError, match=rf"\A{re.escape(message)}\Z"):
        call(torch.ones(3, dtype=torch.bfloat16))


def of_vectors(input, output, rows):
    for row in rows:
        x = input.row(row)
        language.store(output.row(row), 0, language.load_vector(x, 0, 4))


def test_vectors_of_rows_that_have_a_stride():
    call, name = operator(library.tile_kernel(of_vectors))
    place = f"{line(of_vectors, 3)}: language.store(output.row(row), 0, language.load_vector(x, 0,"
    message = (
        f"{name}: its kernel cannot be compiled for float32-1d,float32-1d: a row may have a "
        "stride, so vectors cannot be read from it; pass contiguous_rows=True to tile_kernel "
        f"({place}"
    )
    with pytest.raises(RuntimeError, match=rf"\A{re.escape(message)}"):
        call(torch.ones(4))
    call, _ = operator(library.tile_kernel(of_vectors, contiguous_rows=True))
    assert call(torch.ones(8)[::2]).tolist() == [1.0] * 4


def test_dtype_that_no_kernel_reads():
    call, name = operator(library.tile_kernel(of_bits))
    dtype = "float8_e5m2"
    message = (
        f"{name}: its kernel cannot be compiled for {dtype}-1d,{dtype}-1d: a kernel cannot read "
    )
    with pytest.raises(RuntimeError, match=re.escape(message + dtype)):
        call(torch.ones(3).to(torch.float8_e5m2))


def test_dtype_that_an_elementwise_kernel_does_not_take(device):
    call, name = operator(library.elementwise_kernel(lambda x: x))
    short = name.partition("::")[2]
    for dtype in (torch.int64, torch.complex64, torch.bool):
        message = f"{short}: input must have a floating-point dtype, got {str(dtype)[6:]}"
        with pytest.raises(TypeError, match=rf"\A{re.escape(message)}\Z"):
            call(torch.ones(3, dtype=dtype, device=device))


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        ((torch.float32,), "float32"),
        ((torch.float32, torch.int8, torch.bool), "float32, int8 or bool"),
        (library.operators.FLOATING, "a floating-point dtype"),
        (
            (*library.operators.SIGNED, *library.operators.UNSIGNED, torch.float32),
            "an integer dtype or float32",
        ),
    ],
    ids=str,
)
def test_dtypes_in_words(dtypes, words):
    assert library.operators.in_words(dtypes) == words


def two(a, b):
    return a + b


def tile_of_two(a, b):
    pass


def test_wrong_number_of_arguments():
    """Registration refuses the kernel."""
    for kernel, message in (
        (
            library.elementwise_kernel(two),
            f"its kernel must take 1 arguments (input), got two ({line(two, 0)}), which takes 2",
        ),
        (
            library.elementwise_kernel(two_values),
            "its kernel must return 1 value, one for each result, got two_values "
            f"({line(two_values, 0)}), which returns 2 in line "
            f"{two_values.__code__.co_firstlineno + 1}",
        ),
        (
            library.tile_kernel(tile_of_two),
            "its kernel must take 3 arguments (input, result, tiles), got tile_of_two "
            f"({line(tile_of_two, 0)}), which takes 2",
        ),
        (
            library.tile_kernel(of_bits, tiles=two_values),
            "tiles must take arguments that the kernel has (input, output), got x in two_values "
            f"({line(two_values, 0)})",
        ),
    ):
        name = f"foo_wrong::f{next(serial)}"
        library.define(name, "(Tensor input) -> Tensor")
        with pytest.raises(TypeError, match=rf"\A{re.escape(f'{name}: {message}')}\Z"):
            library.register_kernel(name, "cpu", kernel)


def returns_its_result(input, output, rows):
    for row in rows:
        output.flat[row] = 1.0
    return output


def test_a_tile_kernel_that_returns_something():
    """Refused at definition."""
    first = returns_its_result.__code__.co_firstlineno
    message = (
        "a tile kernel must write its results to its arguments and return nothing, got "
        f"returns_its_result ({line(returns_its_result, 0)}), which returns a value in line "
        f"{first + 3}"
    )
    for make in (
        lambda: library.tile_kernel(returns_its_result),
        lambda: library.tile_kernel(of_bits, finish=returns_its_result),
    ):
        with pytest.raises(TypeError, match=rf"\A{re.escape(message)}\Z"):
            make()


def test_arguments_that_no_kernel_takes():
    for schema, argument, type_ in (
        ("(Tensor input, Device where) -> Tensor", "where", "Device"),
        ("(Tensor input, Tensor?[] others) -> Tensor", "others", "List[Optional[Tensor]]"),
        ("(Tensor input, bool[] flags) -> Tensor", "flags", "List[bool]"),
    ):
        message = (
            f"{argument} must be Tensor, Tensor[], Scalar, float, int, bool, float[], int[], str, "
            "ScalarType or Generator, or an optional one of these, for a kernel of Numba, got "
            f"{type_}"
        )
        with pytest.raises(TypeError, match=re.escape(message)):
            operator(library.elementwise_kernel(two), schema)


def test_device_types_of_a_kernel():
    name = f"foo_wrong::f{next(serial)}"
    library.define(name, "(Tensor input) -> Tensor")
    with pytest.raises(
        ValueError, match="device_types of a kernel of Numba must be cpu or foo, got 'cuda'"
    ):
        library.register_kernel(name, ("cpu", "cuda"), library.elementwise_kernel(text))


def test_kernel_is_no_function():
    with pytest.raises(TypeError, match="two is a kernel and cannot be called directly"):
        library.elementwise_kernel(two)(1, 2)


def test_tile_kernel_without_a_fake_kernel():
    name = f"foo_wrong::f{next(serial)}"
    library.define(name, "(Tensor input) -> Tensor")
    library.register_kernel(name, "cpu", library.tile_kernel(of_bits))
    message = (
        f"{name}: a tile kernel needs a fake kernel, which says how its results are allocated: "
        "register one with foo_ops.library.register_fake"
    )
    with pytest.raises(RuntimeError, match=rf"\A{re.escape(message)}\Z"):
        getattr(torch.ops.foo_wrong, name.partition("::")[2])(torch.ones(3))


def no_annotation(x) -> float:
    return x


def of_text(x: str) -> float:
    return x


def returns_nothing(x: float):
    return x


def only_numbers(x: float = 1.0) -> float:
    return x


def keyword_of_text(x: float, mode: str = "a") -> float:
    return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_annotation, "must annotate x with float, int, bool or complex, got nothing"),
        (of_text, "must annotate x with float, int, bool or complex, got str"),
        (
            returns_nothing,
            "must annotate what it returns with float, int, bool, complex or a tuple of these, "
            "got nothing",
        ),
        (only_numbers, "must take at least one tensor, an argument without a default"),
        (
            keyword_of_text,
            'must annotate mode with float, int, bool, typing.Literal["a", "b"], int | float, '
            "list[float], list[int] or a tuple, or one of these and None, got str",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_annotations(function, message):
    name = f"foo_wrong::g{next(serial)}"
    message = f"{name}: {function.__name__} ({line(function, 0)}) {message}"
    with pytest.raises(TypeError, match=rf"\A{re.escape(message)}\Z"):
        library.numba_op(name, function)
