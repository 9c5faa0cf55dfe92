"""Bounds checks find accesses outside of tensors and do not perform them."""

import itertools
import re
import textwrap

import pytest
import torch
from support.processes import python

from foo_ops import language, library
from foo_ops.testing import OperatorCheckError, OpSpec, Sample, check_operator, random

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = ("cpu", "foo")
GUARD = -1.0
serial = itertools.count()


def define(function, **options):
    """Define ``f_(input, output)`` with a tile kernel, which writes its second argument."""
    name = f"f{next(serial)}_"
    library.define(f"foo_bounds::{name}", "(Tensor input, Tensor(a!) output) -> ()")
    library.register_fake(f"foo_bounds::{name}", lambda input, output: None)
    options = {"tiles": lambda input: input.shape[0], **options}
    library.register_kernel(
        f"foo_bounds::{name}", DEVICES, library.tile_kernel(function, **options)
    )
    return getattr(torch.ops.foo_bounds, name), name


def message_of(name, function, offset, what, argument, shape):
    code = function.__code__
    place = f"{code.co_filename}:{code.co_firstlineno + offset}"
    return (
        rf"\A{name}: {re.escape(f'{what} is outside of {argument}, which has shape {shape}')} "
        + (rf"\({re.escape(place)}: .*\)\Z")
    )


def element(input, output, rows):
    for row in rows:
        output[row, row + 4] = input[row, row]


def element_before(input, output, rows):
    for row in rows:
        output[row, row - 1] = input[row, row]


def read(input, output, rows):
    for row in rows:
        for i in range(input.shape[1]):
            output[row, i] = 7.0 + input[row + 1, i]


def of_row(input, output, rows):
    for row in rows:
        y = output.row(row)
        for i in range(input.shape[1] + 1):
            y[i] = 7.0


def no_such_row(input, output, rows):
    for row in rows:
        output.row(row + 1)[0] = input.row(row)[0]


def of_flat(input, output, rows):
    for row in rows:
        output.flat[row + 9] = input.flat[row]


def of_memory(input, output, rows):
    for row in rows:
        language.store(output.data, (row + 1) * output.strides[0] + 5, 7.0)


def dimension(input, output, rows):
    for row in rows:
        for i in range(3):
            output[row, 0] = input.shape[i]


def element_at_a_constant(input, output, rows):
    for row in rows:
        output[row, -6] = input[row, row]


def of_row_at_a_constant(input, output, rows):
    for row in rows:
        output.row(row)[-7] = input[row, row]


def of_flat_at_a_constant(input, output, rows):
    for row in rows:
        output[row, 0] = input.flat[-12]


def row_at_a_constant(input, output, rows):
    for row in rows:
        output[row, 0] = input.row(-3)[row]


def helper(y, index):
    y[index] = 7.0


def in_helper(input, output, rows):
    for row in rows:
        helper(output.row(row), 5)


CASES = [
    (element, 2, "output[1, 5]", "output"),
    (element_before, 2, "output[0, -1]", "output"),
    (read, 3, "input[2, 0]", "input"),
    (of_row, 4, "output.row(0)[5]", "output"),
    (no_such_row, 2, "output.row(2)", "output"),
    (of_flat, 2, "output.flat[10]", "output"),
    (of_memory, 2, "output.data[14]", "output"),
    (dimension, 3, "input.shape[2]", "input"),
    (in_helper, None, "output.row(0)[5]", "output"),
    # Messages show negative constants as written.
    (element_at_a_constant, 2, "output[0, -6]", "output"),
    (of_row_at_a_constant, 2, "output.row(0)[-7]", "output"),
    (of_flat_at_a_constant, 2, "input.flat[-12]", "input"),
    (row_at_a_constant, 2, "input.row(-3)", "input"),
]


def guarded_rows(device):
    """Return rows of 5 elements, between elements that no kernel may touch."""
    memory = torch.full((4, 9), GUARD, device=device)
    return memory, memory[1:3, 2:7].fill_(0.0)


def is_untouched(memory):
    inside = torch.zeros(4, 9, dtype=torch.bool)
    inside[1:3, 2:7] = True
    return bool((memory.cpu()[~inside] == GUARD).all())


@pytest.mark.parametrize("contiguous_rows", [False, True])
@pytest.mark.parametrize(
    ("function", "offset", "what", "argument"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_an_access_outside(function, offset, what, argument, contiguous_rows, device):
    call, name = define(function, contiguous_rows=contiguous_rows)
    memory, output = guarded_rows(device)
    input = torch.ones(2, 5, device=device)
    place = (helper, 1) if offset is None else (function, offset)
    message = message_of(name, *place, what, argument, [2, 5])
    for _ in range(2):
        with library.check_bounds(), pytest.raises(IndexError, match=message) as caught:
            call(input, output)
        assert type(caught.value) is IndexError
        assert is_untouched(memory)


@pytest.mark.parametrize("contiguous_rows", [False, True])
def test_what_is_outside_reads_as_zero(contiguous_rows, device):
    for function in (read, read_of_row, read_vector) if contiguous_rows else (read, read_of_row):
        call, _ = define(function, contiguous_rows=contiguous_rows)
        output = torch.zeros(2, 5, device=device)
        with library.check_bounds(), pytest.raises(IndexError):
            call(torch.ones(2, 5, device=device), output)
        assert output.tolist() == [[8.0] * 5, [7.0] * 5]


def read_of_row(input, output, rows):
    for row in rows:
        x = input.row(row)
        for i in range(5):
            output[row, i] = 7.0 + x[i + 5 * row]


def read_vector(input, output, rows):
    for row in rows:
        x = input.row(row)
        sevens = language.splat(language.cast(7, input), 4)
        language.store(output.row(row), 0, sevens + language.load_vector(x, 4 * row, 4))
        output[row, 4] = 7.0 + x[4 + 4 * row]


def vectors(input, output, rows):
    for row in rows:
        language.store(output.row(row), 2, language.load_vector(input.row(row), 0, 4))


def vectors_before(input, output, rows):
    for row in rows:
        x = language.shift(input.row(row), 2)
        language.store(output.row(row), 0, language.load_vector(x, -3, 4))


@pytest.mark.parametrize(
    ("function", "offset", "what", "argument"),
    [
        (vectors, 2, "output.row(0)[2:6]", "output"),
        (vectors_before, 3, "input.row(0)[-1:3]", "input"),
    ],
)
def test_vectors_outside(function, offset, what, argument, device):
    call, name = define(function, contiguous_rows=True)
    memory, output = guarded_rows(device)
    message = message_of(name, function, offset, what, argument, [2, 5])
    with library.check_bounds(), pytest.raises(IndexError, match=message):
        call(torch.ones(2, 5, device=device), output)
    assert is_untouched(memory)
    # A vector that is partly outside is not written at all, and reads as zeros.
    assert output.tolist() == [[0.0] * 5] * 2


def shifted(input, output, rows):
    for row in rows:
        x, y = language.shift(input.row(row), 3), language.shift_bytes(output.row(row), 4)
        language.store(y, 0, language.load_vector(x, -3, 4))
        language.store(y, -1, x[-1])
        y[-1] = x[1]


def test_what_is_inside_passes(device):
    """Checked and unchecked calls give the same values."""
    call, _ = define(shifted, contiguous_rows=True)
    input = torch.randn(2, 5, device=device)
    results = torch.zeros(2, 2, 5, device=device)
    call(input, results[0])
    with library.check_bounds():
        call(input, results[1])
    assert torch.equal(results[0], results[1])
    # Constants count from the end for indices; for offsets into memory they do not.
    expected = torch.stack([input.cpu()[:, i] for i in (4, 0, 1, 2, 4)], dim=1)
    assert torch.equal(results[1].cpu(), expected)


def test_only_what_is_checked_costs(device):
    """Both kernels exist in one process; calls outside of check_bounds use the unchecked one."""
    call, _ = define(lambda input, output, rows: None)
    from foo_ops.kernels.compiler.resolve import _addresses

    before = set(_addresses)
    input, output = torch.ones(2, 5, device=device), torch.ones(2, 5, device=device)
    call(input, output)
    with library.check_bounds():
        call(input, output)
        with library.check_bounds():
            pass
        call(input, output)
    call(input, output)
    signatures = sorted(signature for _, signature in set(_addresses) - before)
    assert signatures == ["float32-2d,float32-2d", "float32-2d,float32-2d,checked"]


def outside_when_counted(input, output):
    return int(input[0, 9])


def outside_when_finished(output):
    output[0, 9] = 1.0


@pytest.mark.parametrize("option", ["tiles", "finish"])
def test_other_functions_of_a_kernel(option, device):
    function = outside_when_counted if option == "tiles" else outside_when_finished
    call, name = define(in_bounds, **{option: function})
    argument = "input" if option == "tiles" else "output"
    message = message_of(name, function, 1, f"{argument}[0, 9]", argument, [2, 5])
    input, output = torch.ones(2, 5, device=device), torch.zeros(2, 5, device=device)
    with library.check_bounds(), pytest.raises(IndexError, match=message):
        call(input, output)
    # ``tiles`` runs first, when nothing has been written yet.
    assert output.sum().item() == (0 if option == "tiles" else 10)


def in_bounds(input, output, rows):
    for row in rows:
        for i in range(input.shape[1]):
            output[row, i] = 1.0


def test_on_several_threads(device):
    """The error shows the first failure of any thread, complete."""
    call, name = define(many_outside)
    input = torch.zeros(20000, 3, device=device)
    output = torch.zeros(20000, 3, device=device)
    torch.set_num_threads(3)
    with library.check_bounds():
        for _ in range(20):
            with pytest.raises(IndexError) as caught:
                call(input, output)
            found = re.match(rf"{name}: output\[(\d+), (\d+)\] is outside of", str(caught.value))
            row, column = map(int, found.groups())
            assert column == 3 + row % 7
    assert output.count_nonzero() == 0


def many_outside(input, output, rows):
    for row in rows:
        output[row, 3 + row % 7] = 1.0


def test_check_operator_finds_it(device):
    name = f"shifted_on_{device}"
    library.define(f"foo_bounds::{name}", "(Tensor input) -> Tensor")
    library.register_fake(f"foo_bounds::{name}", lambda input: torch.empty_like(input))
    library.register_kernel(f"foo_bounds::{name}", device, library.tile_kernel(next_element))
    spec = OpSpec(
        operator=getattr(torch.ops.foo_bounds, name).default,
        reference=lambda input: input.clone(),
        dtypes=(torch.float32,),
        sized=lambda dtype, size: Sample(tuple(random("shifted", (size,), dtype=dtype))),
        differentiable=False,
        devices=(device,),
    )
    message = rf"{name}: input\.row\(0\)\[1\] is outside of input, which has shape \[1\] \("
    with pytest.raises(OperatorCheckError, match=message):
        check_operator(spec, checks=["values"])


def next_element(input, output, rows):
    for row in rows:
        x = input.row(row)
        for i in range(input.shape[-1]):
            output.row(row)[i] = x[i] + 0 * x[i + 1]


PROGRAM = """
    import torch
    import foo_ops
    from foo_ops import library

    library.define("foo_bounds::past_", "(Tensor(a!) output) -> ()")
    library.register_fake("foo_bounds::past_", lambda output: None)

    @library.register_kernel("foo_bounds::past_", "cpu")
    @library.tile_kernel
    def past(output, rows):
        for row in rows:
            output[row, 5] = 7.0

    try:
        torch.ops.foo_bounds.past_(torch.zeros(3, 6)[:, :5])
    except IndexError as error:
        print(type(error).__name__, error)
    else:
        print("no error")
"""


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        ("1", "IndexError past_: output[0, 5] is outside of output, which has shape [3, 5] ("),
        ("0", "no error"),
    ],
)
def test_environment(value, printed, tmp_path):
    program = tmp_path / "program.py"
    # The same kernel on other lines: the cache on disk must not report the first lines.
    for lines in (0, 3):
        program.write_text("\n" * lines + textwrap.dedent(PROGRAM))
        result = python(program, FOO_CHECK_BOUNDS=value)
        assert result.stdout.startswith(printed), result.stdout + result.stderr
        if value == "1":
            assert result.stdout.endswith(f"({program}:{13 + lines}: output[row, 5] = 7.0)\n")


def test_switch_is_0_or_1():
    result = python("import foo_ops.library", FOO_CHECK_BOUNDS="yes")
    assert "ValueError: FOO_CHECK_BOUNDS must be 0 or 1, got yes\n" in result.stderr
