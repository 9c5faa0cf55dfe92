"""FOO_INTERPRET=1: users' kernels run in Python, with the values of compiled ones."""

import operator
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support import kernels_to_interpret
from support.exact import units_in_the_last_place
from support.parts import whole
from support.processes import module, python

from foo_ops import language, library
from foo_ops.kernels.interpret import language as interpreted_language
from foo_ops.kernels.interpret.views import FromEnd

REPOSITORY = Path(__file__).parents[2]


def interpreted(program, *arguments, **options):
    """Run a program with interpreted kernels."""
    return python(program, *arguments, **{"FOO_INTERPRET": "1"} | options)


def count_interpreted(file, chosen):
    """Run tests of a file with interpreted kernels, and return how many passed."""
    options = ("-v", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", chosen)
    process = interpreted(module("pytest"), *options, file, folder=REPOSITORY)
    assert process.returncode == 0, process.stdout
    return int(re.search(r"(\d+) passed", process.stdout)[1])


def test_same_bits(tmp_path):
    """These kernels call no approximated function, and add in a fixed order."""
    file = tmp_path / "results.pt"
    process = interpreted(Path(kernels_to_interpret.__file__), file)
    assert process.returncode == 0, process.stderr
    results, expected = torch.load(file), kernels_to_interpret.all_calls()
    assert results.keys() == expected.keys()
    for case, tensors in expected.items():
        for position, (result, tensor) in enumerate(zip(results[case], tensors, strict=True)):
            message = f"{case}, result {position}: {{}}".format
            torch.testing.assert_close(
                result, tensor, rtol=0, atol=0, equal_nan=True, check_stride=True, msg=message
            )


@pytest.mark.parametrize("operator", ["rms_norm", *whole("silu_mul", "layer_norm")])
def test_own_operators_are_within_their_budgets(operator):
    """Values and gradients against float64, in all dtypes, on both devices."""
    samples = "size7 or size1 or size0"
    chosen = f"{operator} and not add_ and (values or gradients) and ({samples})"
    assert count_interpreted("tests/operators/test_matrix.py", chosen) >= 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["erf", "exp", "exp2", "log", "tanh"])
def test_functions_are_within_half_a_unit_or_so(name, dtype):
    """Interpreted functions are more accurate than compiled ones, and zero where those are."""
    x = torch.linspace(-80, 80, 10_001, dtype=dtype)
    x = x.exp() if name == "log" else x
    result = torch.from_numpy(getattr(interpreted_language, name)(x.numpy()))
    exact = getattr(torch, name)(x.double())
    assert result.dtype == dtype
    assert units_in_the_last_place(result, exact, dtype) <= (0.51 if dtype == torch.float32 else 1)
    if name == "exp2" and dtype == torch.float32:
        assert interpreted_language.exp2(np.float32(-126.6)) == 0


@pytest.mark.parametrize(
    ("file", "chosen", "count"),
    [
        ("test_elementwise.py", "test_python_that_a_kernel_may_use", 7),
        ("test_tile_indexing.py", "negative or flat or offsets or shifted or branches", 16),
        ("../compiler/test_constants.py", "root or function or local or tuple or floor", 8),
        pytest.param(
            "test_texts.py", "elementwise_kernel or tile_kernel", 55, marks=pytest.mark.whole
        ),
        pytest.param(
            "test_numbers.py",
            "test_tile_kernel or derivatives_with_lists",
            26,
            marks=pytest.mark.whole,
        ),
        pytest.param(
            "test_tensor_lists.py", "written_in_place or read", 20, marks=pytest.mark.whole
        ),
        pytest.param("test_optional_tensors.py", "tile_kernel", 18, marks=pytest.mark.whole),
        pytest.param(
            "test_products.py", "mixed or dimensions or slices", 30, marks=pytest.mark.whole
        ),
        pytest.param(
            "test_numba_op_definitions.py",
            "test_globals_are_those_of_the_first_use",
            2,
            marks=pytest.mark.whole,
        ),
    ],
)
def test_compiled_kernels_pass_the_same(file, chosen, count):
    assert count_interpreted(f"tests/library/{file}", chosen) >= count


PROGRAM = """
import torch
from foo_ops import library

library.define("debugged::f", "(Tensor x) -> Tensor")
library.register_fake("debugged::f", torch.empty_like)

@library.register_kernel("debugged::f", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows={contiguous})
def f(x, y, rows):
    {first}
    for row in rows:
        source, target = x.row(row), y.row(row)
        for i in range(x.shape[-1] + {more}):
            target[i] = source[i] + 1

print(torch.ops.debugged.f(torch.arange(6.0, device="{device}").view(2, 3)).tolist())
"""


def program(first="pass", more=0, device="cpu", contiguous=False):
    return PROGRAM.format(first=first, more=more, device=device, contiguous=contiguous)


def test_print(device):
    process = interpreted(program("print(x, x.row(1), x[1, 0], len(rows))", device=device))
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        "View(float32, shape=(2, 3), strides=(3, 1)) float32 [3.0, 4.0, 5.0] 3.0 2",
        "[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]",
    ]


def test_print_to_a_stream_that_was_replaced():
    text = """
import contextlib
import io
import sys
import torch
from foo_ops import library

@library.numba_op("debugged::printed")
def printed(x: float) -> float:
    print(x, file=sys.stdout)
    return x

for number in (1.0, 2.0):
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        printed(torch.tensor(number, dtype=torch.float32 if number == 1 else torch.float64))
    print(repr(stream.getvalue()))
"""
    process = interpreted(text)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [r"'1.0\n'", r"'2.0\n'"]


def test_debugger_stops_in_a_kernel(device):
    commands = "p x.shape\nn\np rows\nc\n"
    process = interpreted(program("breakpoint()", device=device), input=commands)
    assert process.returncode == 0, process.stderr
    assert "(Pdb) (2, 3)\n" in process.stdout
    assert "range(0, 2)\n" in process.stdout
    assert process.stdout.endswith("[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]\n")


@pytest.mark.parametrize(
    ("contiguous", "message"),
    [
        (False, "IndexError: index 3 is outside of a row of 3 elements"),
        (True, "IndexError: index 3 is outside of the elements from 0 to 2"),
    ],
)
def test_index_outside_is_an_exception_with_its_place(contiguous, message, device):
    process = interpreted(program(more=1, device=device, contiguous=contiguous))
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == message
    assert 'File "<string>", line 15, in f' in process.stderr


def test_indices_that_are_refused(device):
    """A negative variable is out of bounds; indices that do not compile raise TypeError."""
    text = f"""
import torch
from foo_ops import language, library

library.define("debugged::f", "(Tensor x) -> Tensor")
library.register_fake("debugged::f", torch.empty_like)

@library.register_kernel("debugged::f", ("cpu", "foo"))
@library.tile_kernel
def f(x, y, rows):
    for access in (
        lambda: x[1 - len(rows), 0],
        lambda: x.row(1)[1 - len(rows)],
        lambda: x.flat[1 - len(rows)],
        lambda: x.row(1 - len(rows)),
        lambda: language.load(x.data, -1),
        lambda: x.flat[-7],
        lambda: x.row(0)[-4],
        lambda: x.row(-3),
        lambda: x[0],
        lambda: x.flat[0, 0],
        lambda: x.row(0)[0, 0],
        lambda: x.data[0],
        lambda: language.load_vector(x.row(0), 0, 2),
    ):
        try:
            print(access())
        except (IndexError, TypeError) as error:
            print(f"{{type(error).__name__}}: {{error}}")

torch.ops.debugged.f(torch.ones(2, 3, device="{device}"))
"""
    process = interpreted(text)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        "IndexError: index (-1, 0) is outside of the shape (2, 3)",
        "IndexError: index -1 is outside of a row of 3 elements",
        "IndexError: index -1 is outside of the 6 elements",
        "IndexError: row -1 is outside of the 2 rows",
        "IndexError: index -1 is outside of the elements from 0 to 5",
        "IndexError: index -7 is outside of the 6 elements",
        "IndexError: index -4 is outside of a row of 3 elements",
        "IndexError: row -3 is outside of the 2 rows",
        "TypeError: wrong index: x has 2 dimensions and must be given one index for each, got 1 "
        "(x.row(i) is a row, x.flat[i] the i-th element)",
        "TypeError: wrong index: a row or x.flat must be given one index, got 2",
        "TypeError: wrong index: a row or x.flat must be given one index, got 2",
        "TypeError: wrong index: x.data cannot be indexed, since that would ignore strides: "
        "write x[i, j] or x.flat[i] for an element, or language.load(x.data, offset) to read "
        "memory",
        "TypeError: a row may have a stride, so vectors cannot be read from it; pass "
        "contiguous_rows=True to tile_kernel",
    ]


@pytest.mark.parametrize(
    "number", [3, 2.5, np.float32(3), np.int64(3), np.arange(1, 5, dtype=np.float32)], ids=repr
)
def test_negative_constants_calculate_as_other_numbers(number):
    """Also with float32 numbers, whose type a constant does not change."""
    names = "add sub mul truediv floordiv mod pow lt le gt ge eq ne"
    operations = [getattr(operator, name) for name in names.split()]
    if isinstance(number, (int, np.int64)):
        # No power: NumPy refuses negative integer exponents of integers.
        operations.remove(operator.pow)
        operations += [operator.and_, operator.or_, operator.xor]
    for operation in operations:
        for result, expected in (
            (operation(number, FromEnd(-2)), operation(number, -2)),
            (operation(FromEnd(-2), number), operation(-2, number)),
        ):
            assert type(result) is type(expected), operation
            assert np.asarray(result).dtype == np.asarray(expected).dtype, operation
            assert np.array_equal(result, expected, equal_nan=True), operation
    if isinstance(number, int):
        assert (FromEnd(-2) << 3, FromEnd(-9) >> 3) == (-16, -2)


def test_exception_comes_once_and_from_the_thread_of_the_call():
    """Not from the thread that would run the end of a long tensor in a compiled kernel."""
    text = """
import threading
import torch
from foo_ops import library

@library.numba_op("debugged::small")
def small(x: float) -> float:
    assert x < 99_999, f"got {x} in {threading.current_thread().name}"
    return x

torch.set_num_threads(4)
long = torch.arange(100_000.0)
for x in (long, long.repeat_interleave(2)[::2], torch.arange(3.0)):
    try:
        print(small(x))
    except AssertionError as error:
        print("raised:", error)
"""
    process = interpreted(text)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        "raised: got 99999.0 in MainThread",
        "raised: got 99999.0 in MainThread",
        "tensor([0., 1., 2.])",
    ]


def test_keyword_only_arguments(device):
    text = f"""
import torch
from foo_ops import library

@library.numba_op("debugged::f", backward=lambda g, x, *, k: g * k)
def f(x: float, *, k: float = 2.0) -> float:
    return x * k

def refuse_more(*, x):
    raise ValueError("more than 9 columns are wrong")

@library.tile_kernel(
    tiles=lambda *, y: y.rows, check=lambda x, *, k: x.shape[-1] <= k, refuse=refuse_more
)
def scale(x, *, k, y, rows):
    for row in rows:
        for i in range(x.shape[-1]):
            y[row, i] = k * x[row, i]

library.define("debugged::g", "(Tensor x, int k) -> Tensor")
library.register_fake("debugged::g", lambda x, k: torch.empty_like(x))
library.register_kernel("debugged::g", ("cpu", "foo"), scale)
x = torch.ones(2, device="{device}", requires_grad=True)
f(x, k=3.0).sum().backward()
print(f(x).tolist(), f(x, k=3.0).tolist(), x.grad.tolist())
y = torch.ones(1, 2, device="{device}")
print(torch.ops.debugged.g(y, 9).tolist())
try:
    torch.ops.debugged.g(y, 1)
except ValueError as error:
    print(error)
"""
    for process in (interpreted(text), interpreted(text, FOO_INTERPRET="0")):
        assert process.returncode == 0, process.stderr
        assert process.stdout.splitlines() == [
            "[2.0, 2.0] [3.0, 3.0] [3.0, 3.0]",
            "[[9.0, 9.0]]",
            "more than 9 columns are wrong",
        ]


def test_tensor_without_dimensions_or_elements(device):
    text = f"""
import torch, foo_ops
x = torch.tensor(-2.0, device="{device}")
print(torch.ops.foo.abs(x).item(), foo_ops.rms_norm(x[None], eps=0.0).tolist())
print(torch.ops.foo.abs(x.new_empty(0)).tolist(), foo_ops.rms_norm(x.new_empty(0, 3)).tolist())
"""
    process = interpreted(text)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == ["2.0 [-1.0]", "[] []"]


def test_every_name_of_the_language_is_there():
    for name in language.__all__:
        assert callable(getattr(interpreted_language, name)), name


@pytest.mark.parametrize("name", ["print", "breakpoint"])
def test_message_of_the_compiler_says_how_to_debug(name):
    call = {"print": lambda x: print(x), "breakpoint": lambda x: breakpoint()}[name]
    lib = library.Library(f"no_{name}", "FRAGMENT")
    lib.define("f(Tensor x) -> Tensor")
    library.register_kernel(f"no_{name}::f", "cpu", library.elementwise_kernel(call), lib=lib)
    message = re.escape(
        f"no_{name}::f: its kernel cannot be compiled for float32: a compiled kernel cannot use "
        f"{name}; set FOO_INTERPRET=1 to interpret kernels as Python, with print, pdb and "
        "exceptions ("
    )
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops, f"no_{name}").f(torch.ones(2))
    lib._destroy()


def test_switch_is_0_or_1():
    process = interpreted("import foo_ops.language", FOO_INTERPRET="yes")
    assert "ValueError: FOO_INTERPRET must be 0 or 1, got yes\n" in process.stderr
