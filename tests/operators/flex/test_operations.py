"""Every operation of programs in every dtype, on pairs of extreme numbers."""

import functools
import itertools

import pytest
import torch
from support.flex_programs import Writer, finite, scores_of
from support.parts import whole

from foo_ops.kernels.flex import program

FLOATS = ("float32", "float64")
INTEGERS = program.INTEGERS
ONE_OPERAND = {"neg", "abs", "sign", "not"}
OF_BITS = {"not", "and", "or", "xor"}
OF_INTEGERS = {"shift_left", "shift_right"}
OF_FLOATS = {"div", "pow"}
DIVISIONS = {"floor_divide", "trunc_divide", "remainder", "fmod"}
# Source of each operand: the query's lanes, or the key alone.
SIDES = list(itertools.product(("query", "key"), repeat=2))


def operations_of(dtype):
    """Return the operations for numbers of a dtype, except where and cast."""
    if dtype == "bool":
        return sorted(OF_BITS) + list(program.COMPARISONS)
    known = [*program.ARITHMETIC, *ONE_OPERAND, *program.COMPARISONS]
    if dtype in FLOATS:
        return [*(it for it in known if it not in OF_BITS | OF_INTEGERS), *program.FUNCTIONS]
    return [it for it in known if it not in OF_FLOATS]


def edges(dtype):
    """Return the numbers of which all pairs are computed."""
    if dtype == "bool":
        return torch.tensor([False, True])
    kind = getattr(torch, dtype)
    if dtype in FLOATS:
        inf = float("inf")
        small = [0.0, -0.0, 0.5, 1.0, -1.0, 1.5, 2.5, -2.5, 3.0, -7.25, 100.0, 0.125]
        return torch.tensor([*small, inf, -inf, float("nan"), 1e20, -1e-20], dtype=kind)
    limits = torch.iinfo(kind)
    values = [0, 1, 2, 3, 5, 7, 31, 63, 100, limits.max, limits.max - 1]
    if dtype != "uint8":
        values += [-1, -2, -3, -7, -100, limits.min, limits.min + 1]
    return torch.tensor(values, dtype=kind)


def is_without_overflow(operation, x, y):
    """Return where a quotient fits its dtype, and where torch defines a shift's count.

    Torch leaves the other results open.
    """
    if operation in OF_INTEGERS:
        return (y >= 0) & (y < torch.iinfo(x.dtype).bits)
    if operation in DIVISIONS:
        return ~is_beyond(x, y)
    return torch.ones_like(x, dtype=torch.bool)


def is_beyond(x, y):
    """Return where a quotient does not fit: the processor would end the process."""
    return (x.long() == torch.iinfo(x.dtype).min) & (y.long() == -1)


def exact(operation, x, y):
    """Compute an operation with torch; floats are float64."""
    if operation in ONE_OPERAND or operation in program.FUNCTIONS:
        name = "bitwise_not" if operation == "not" else operation
        return getattr(torch, name)(x)
    if operation in OF_BITS:
        return getattr(torch, f"bitwise_{operation}")(x, y)
    names = {"shift_left": "bitwise_left_shift", "shift_right": "bitwise_right_shift"}
    function = getattr(torch, names.get(operation, operation), None)
    if operation == "trunc_divide":
        function = functools.partial(torch.div, rounding_mode="trunc")
    if x.is_floating_point() or operation not in DIVISIONS:
        return function(x, y)
    # Division of integers by zero gives zero here.
    return torch.where(y == 0, 0, function(x, torch.where((y == 0) | is_beyond(x, y), 1, y)))


DAILY = ("bool", "int8", "int64", "float32")
DTYPES = [*DAILY, *whole(*sorted({*INTEGERS, *FLOATS} - {*DAILY}))]


@pytest.mark.parametrize("sides", SIDES, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_of_numbers(dtype, sides, device):
    """One head per operation; the pairs lie along the queries and their keys."""
    operations = operations_of(dtype)
    values = edges(dtype)
    x, y = (it.reshape(-1).contiguous() for it in torch.meshgrid(values, values, indexing="ij"))
    count = len(x)
    writer = Writer()
    head = writer.input("head")
    first, second = (
        writer.load(dtype, number, writer.input(side)) for number, side in enumerate(sides)
    )
    result = writer.number(0.0, "float64")
    for number, operation in enumerate(operations):
        kind = "bool" if operation in program.COMPARISONS else dtype
        is_one = operation in ONE_OPERAND or operation in program.FUNCTIONS
        node = writer.add(kind, operation, *((first,) if is_one else (first, second)))
        if kind in FLOATS:
            node = writer.finite(node, kind)
        is_mine = writer.add("bool", "eq", head, writer.integer(number))
        result = writer.add("float64", "where", is_mine, writer.cast(node, "float64"), result)
    nothing = torch.zeros(len(operations) * count)
    sizes = (1, len(operations), count, count)
    captured = [x.to(device), y.to(device)]
    found = scores_of(writer, result, sizes, nothing, nothing, captured, torch.float64, device)[0]
    for operation, scores in zip(operations, found):
        wide = [it.double() if dtype in FLOATS else it for it in (x, y)]
        expected = exact(operation, *wide)
        if dtype in FLOATS and expected.is_floating_point():
            # Numbers beyond float32 become infinite there.
            expected = expected.to(getattr(torch, dtype)).double()
        expected = finite(expected)
        told = (
            is_without_overflow(operation, x, y)
            if dtype in INTEGERS
            else torch.ones_like(x, dtype=torch.bool)
        )
        room = 1e-14 if dtype != "float32" else 8 * torch.finfo(torch.float32).eps
        room = room * expected.abs() + (1e-36 if dtype == "float32" else 1e-300)
        wrong = ((scores - expected).abs() > room) & told
        assert not wrong.any(), (
            f"{operation} of {x[wrong][:4].tolist()} and {y[wrong][:4].tolist()}: "
            f"{scores[wrong][:4].tolist()}, must be {expected[wrong][:4].tolist()}"
        )


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("source", program.DTYPES)
def test_casts(source, side, device):
    """One head per dtype to which a captured tensor's elements are converted."""
    targets = ("bool", *INTEGERS, *FLOATS)
    kind = getattr(torch, source)
    if kind.is_floating_point:
        values = torch.tensor([0.0, -0.0, 0.25, 1.0, 1.5, 2.75, 100.0, 250.5, -1.5, -100.0, 1e-3])
        values = values.to(kind)
    else:
        values = edges(source)
    writer = Writer()
    head, place = writer.input("head"), writer.input(side)
    value = writer.load(source, 0, place)
    if source in ("float16", "bfloat16"):
        value = writer.cast(value, "float32")
    result = writer.number(0.0, "float64")
    for number, target in enumerate(targets):
        is_mine = writer.add("bool", "eq", head, writer.integer(number))
        converted = writer.cast(writer.cast(value, target), "float64")
        result = writer.add("float64", "where", is_mine, converted, result)
    count = len(values)
    nothing = torch.zeros(len(targets) * count)
    sizes, captured = (1, len(targets), count, count), [values.to(device)]
    found = scores_of(writer, result, sizes, nothing, nothing, captured, torch.float64, device)[0]
    for target, scores in zip(targets, found):
        expected = values.to(getattr(torch, target)).double()
        # Torch leaves open how negative floats convert to unsigned integers.
        told = (
            values.double() >= 0
            if kind.is_floating_point and target == "uint8"
            else values.double().isfinite()
        )
        told &= ~((values.double().abs() > 127) & kind.is_floating_point & (target == "int8"))
        error = (scores - expected).abs()
        assert (error[told] <= 1e-15 * expected[told].abs()).all(), (target, scores, expected)


def test_where_takes_lanes_and_numbers_alike(device):
    """The condition and both values may depend on the query, on the key, or on neither."""
    sources = ("query", "key", "head")
    writer = Writer()
    zero = writer.integer(0)
    places = {name: writer.input(name) for name in sources}
    result = writer.number(0.0, "float64")
    combinations = list(itertools.product(sources, repeat=3))
    batch = writer.input("batch")
    for number, (condition, first, second) in enumerate(combinations):
        odd = writer.add("int32", "and", places[condition], writer.integer(1))
        chosen = writer.add(
            "int32", "where", writer.add("bool", "eq", odd, zero), places[first], places[second]
        )
        is_mine = writer.add("bool", "eq", batch, writer.integer(number))
        chosen = writer.cast(chosen, "float64")
        result = writer.add("float64", "where", is_mine, chosen, result)
    sizes = (len(combinations), 3, 20, 7)
    nothing = torch.zeros(len(combinations) * 3 * 20)
    keys = torch.zeros(len(combinations) * 3 * 7)
    found = scores_of(writer, result, sizes, nothing, keys, [], torch.float64, device)
    queries = torch.arange(20).expand(3, 20)
    where = {"query": queries, "key": queries % 7, "head": torch.arange(3).view(3, 1).expand(3, 20)}
    for scores, (condition, first, second) in zip(found, combinations):
        expected = torch.where(where[condition] % 2 == 0, where[first], where[second]).double()
        torch.testing.assert_close(scores, expected, rtol=1e-14, atol=1e-14)
