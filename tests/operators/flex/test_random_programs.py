"""Random programs in the kernels of flex attention match torch, and so do their gradients.

Operations with jumps, such as comparisons and roundings, get only exact operands. Bounds on the
errors of all others are propagated to the result.
"""

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies
from support.flex_programs import LARGEST, Writer, call_of, finite, scores_of, seen_keys
from support.parts import whole

from foo_ops.kernels.flex import program

SIZES = BATCH, HEADS, QUERIES, KEYS = 2, 3, 37, 19
FLOATS = ("float32", "float64")
WHOLE = ("int32", "int64", "int16", "int8", "uint8")
EXACT = ("add", "sub", "mul", "minimum", "maximum")
DIVISIONS = ("floor_divide", "trunc_divide", "remainder", "fmod")
BITS = ("and", "or", "xor")
SMOOTH = ("exp", "tanh", "sin", "cos", "erf", "expm1")


@dataclasses.dataclass(frozen=True)
class Value:
    """A node: its exact value for each query and key, and its error bound; 0 if exact."""

    node: int
    dtype: str
    exact: torch.Tensor
    error: torch.Tensor

    @property
    def is_exact(self):
        return not self.error.any()


class Graph:
    """A random, growing program, computed alongside by torch."""

    def __init__(self, draw, has_grad=False):
        self.draw, self.writer = draw, Writer()
        generator = torch.Generator().manual_seed(draw(strategies.integers(0, 99)))
        self.query, self.key = (
            torch.randn(BATCH * HEADS * count, generator=generator, dtype=torch.float64)
            for count in (QUERIES, KEYS)
        )
        self.seen = seen_keys(QUERIES, KEYS)
        places = torch.meshgrid(*map(torch.arange, SIZES[:3]), indexing="ij")
        self.places = {
            **dict(zip(("batch", "head", "query"), (it.int() for it in places))),
            "key": self.seen.int().expand(SIZES[:3]),
        }
        self.captured = []
        self.values = []
        query = self.query.view(BATCH, HEADS, QUERIES)
        score = query * self.key.view(BATCH, HEADS, KEYS)[..., self.seen]
        self.add("float64", score, "input", name="score")
        for name, values in self.places.items():
            self.add("int32", values, "input", name=name)
        self.grad = torch.randn(SIZES[:3], generator=generator, dtype=torch.float64)
        if has_grad:
            self.add("float64", self.grad, "input", name="grad")
        for _ in range(draw(strategies.integers(1, 14))):
            getattr(self, draw(strategies.sampled_from(STEPS)))()

    def add(self, dtype, exact, operation, *operands, name="", error=None):
        node = self.writer.add(dtype, operation, *operands, name=name)
        error = torch.zeros(SIZES[:3], dtype=torch.float64) if error is None else error
        self.values.append(Value(node, dtype, exact.to(getattr(torch, dtype)), error))
        return self.values[-1]

    def pick(self, dtypes, exact=True):
        found = [it for it in self.values if it.dtype in dtypes and (it.is_exact or not exact)]
        return self.draw(strategies.sampled_from(found)) if found else None

    def pair(self, dtypes, exact=True):
        """Pick two values of the same dtype."""
        first = self.pick(dtypes, exact)
        return (None, None) if first is None else (first, self.pick([first.dtype], exact))

    def literal(self):
        """Make a literal: a float or an integer."""
        if self.draw(strategies.booleans()):
            value = self.draw(strategies.integers(-20, 20)) / 4
            self.writer.numbers.append(value)
            dtype = self.draw(strategies.sampled_from(FLOATS))
            place, operation = len(self.writer.numbers) - 1, "number"
        else:
            value = self.draw(strategies.sampled_from((0, 1, 2, 3, 5, 7, 16, 100)))
            self.writer.integers.append(value)
            dtype = self.draw(strategies.sampled_from(WHOLE))
            place, operation = len(self.writer.integers) - 1, "integer"
        kind = getattr(torch, dtype)
        self.add(dtype, torch.full(SIZES[:3], value, dtype=kind), operation, place)

    def arithmetic(self):
        x, y = self.pair((*WHOLE, *FLOATS))
        operation = self.draw(strategies.sampled_from(EXACT))
        self.add(x.dtype, getattr(torch, operation)(x.exact, y.exact), operation, x.node, y.node)

    def division(self):
        x, y = self.pair(WHOLE)
        operation = self.draw(strategies.sampled_from(DIVISIONS))
        named = {
            "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        }
        # The lowest integer divided by -1 overflows; division by 0 gives 0.
        limits = torch.iinfo(x.exact.dtype)
        if ((x.exact == limits.min) & (y.exact.long() == -1)).any():
            return
        function = named.get(operation) or getattr(torch, operation)
        exact = torch.where(
            y.exact == 0, 0, function(x.exact, y.exact.masked_fill(y.exact == 0, 1))
        )
        self.add(x.dtype, exact, operation, x.node, y.node)

    def bits(self):
        x, y = self.pair(("bool", *WHOLE))
        operation = self.draw(strategies.sampled_from(BITS))
        exact = getattr(torch, f"bitwise_{operation}")(x.exact, y.exact)
        self.add(x.dtype, exact, operation, x.node, y.node)

    def inverse(self):
        x = self.pick(("bool", *WHOLE))
        self.add(x.dtype, torch.bitwise_not(x.exact), "not", x.node)

    def shift(self):
        x, y = self.pair(WHOLE)
        operation, left = self.draw(strategies.sampled_from((("left", True), ("right", False))))
        width = torch.iinfo(x.exact.dtype).bits - 1
        count = y.exact.clamp(0, width)
        bounds = []
        for limit in (0, width):
            self.writer.integers.append(limit)
            kind = getattr(torch, x.dtype)
            literal = torch.full(SIZES[:3], limit, dtype=kind)
            place = len(self.writer.integers) - 1
            bounds.append(self.add(x.dtype, literal, "integer", place).node)
        above = self.add(x.dtype, y.exact.clamp(min=0), "maximum", y.node, bounds[0])
        within = self.add(x.dtype, count, "minimum", above.node, bounds[1])
        function = torch.bitwise_left_shift if left else torch.bitwise_right_shift
        self.add(x.dtype, function(x.exact, count), f"shift_{operation}", x.node, within.node)

    def one_operand(self):
        x = self.pick((*WHOLE, *FLOATS))
        operation = self.draw(strategies.sampled_from(("neg", "abs", "sign")))
        self.add(x.dtype, getattr(torch, operation)(x.exact), operation, x.node)

    def rounding(self):
        x = self.pick(FLOATS)
        operation = self.draw(strategies.sampled_from(("floor", "ceil", "trunc", "round")))
        self.add(x.dtype, getattr(torch, operation)(x.exact), operation, x.node)

    def comparison(self):
        x, y = self.pair(("bool", *WHOLE, *FLOATS))
        operation = self.draw(strategies.sampled_from(program.COMPARISONS))
        self.add("bool", getattr(torch, operation)(x.exact, y.exact), operation, x.node, y.node)

    def choice(self):
        condition, (x, y) = self.pick(("bool",)), self.pair((*WHOLE, *FLOATS, "bool"), exact=False)
        if condition is not None:
            nodes = (condition.node, x.node, y.node)
            exact, error = (
                torch.where(condition.exact, *pair)
                for pair in ((x.exact, y.exact), (x.error, y.error))
            )
            self.add(x.dtype, exact, "where", *nodes, error=error)

    def conversion(self):
        x = self.pick(("bool", *WHOLE, *FLOATS))
        targets = ("bool", *WHOLE, *FLOATS)
        if x.dtype in FLOATS:
            # Torch leaves open how floats convert that do not fit the integer dtype.
            fits = x.exact.isfinite().all() and x.exact.abs().max() < 2**31
            targets = (*FLOATS, *(("int32", "int64") if fits else ()))
        target = self.draw(strategies.sampled_from(targets))
        self.add(target, x.exact.to(getattr(torch, target)), "cast", x.node)

    def load(self):
        """Read a captured tensor of any dtype; remainders keep its indices in bounds."""
        dtype = self.draw(strategies.sampled_from(program.DTYPES))
        count = self.draw(strategies.integers(0, 3))
        shape = self.draw(
            strategies.lists(strategies.integers(1, 9), min_size=count, max_size=count)
        )
        generator = torch.Generator().manual_seed(len(self.captured))
        table = torch.randint(
            -9 if dtype in (*FLOATS, "int32") else 0, 9, shape, generator=generator
        )
        table = table.to(getattr(torch, dtype))
        if self.draw(strategies.booleans()) and count > 1:
            table = table.transpose(0, 1).contiguous().transpose(0, 1)
        indices = []
        for size in shape:
            x = self.pick(("int32", "int64"))
            self.writer.integers.append(size)
            literal = torch.full(SIZES[:3], size).to(x.exact.dtype)
            divisor = self.add(x.dtype, literal, "integer", len(self.writer.integers) - 1)
            rest = torch.remainder(x.exact, size)
            inside = self.add(x.dtype, rest, "remainder", x.node, divisor.node)
            if self.draw(strategies.booleans()):
                # Counted from the end.
                inside = self.add(x.dtype, rest - size, "sub", inside.node, divisor.node)
            indices.append(inside)
        self.captured.append(table)
        exact = table[tuple(it.exact.long() for it in indices)].expand(SIZES[:3])
        nodes = (len(self.captured) - 1, *(it.node for it in indices))
        if dtype in ("float16", "bfloat16"):
            node = self.writer.load(dtype, *nodes)
            self.add("float32", exact.float(), "cast", node)
        else:
            self.add(dtype, exact, "load", *nodes)

    def smooth(self):
        x = self.pick(FLOATS)
        operation = self.draw(strategies.sampled_from(SMOOTH))
        exact = getattr(torch, operation)(x.exact.double())
        largest = torch.finfo(getattr(torch, x.dtype)).max
        error = 16 * torch.finfo(x.exact.dtype).eps * exact.abs() + 1e-37
        if exact.isfinite().all() and exact.abs().max() < min(largest, LARGEST):
            self.add(x.dtype, exact, operation, x.node, error=error)

    def sum(self):
        x, y = self.pair(FLOATS, exact=False)
        exact = x.exact + y.exact
        error = x.error + y.error + 2 * torch.finfo(exact.dtype).eps * exact.double().abs()
        self.add(x.dtype, exact, "add", x.node, y.node, error=error)

    def product(self):
        x, y = self.pair(FLOATS, exact=False)
        exact = x.exact * y.exact
        error = x.exact.double().abs() * y.error + y.exact.double().abs() * x.error
        error = error + x.error * y.error + 2 * torch.finfo(exact.dtype).eps * exact.double().abs()
        self.add(x.dtype, exact, "mul", x.node, y.node, error=error + 1e-37)


STEPS = sorted(
    {
        *("literal", "arithmetic", "division", "bits", "inverse", "shift", "one_operand"),
        *("rounding", "comparison", "choice", "conversion", "load", "smooth", "sum", "product"),
    }
)


def check(function, examples):
    """Call a function on ``examples`` random inputs. Each compiles a kernel."""
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    settings(hypothesis.given(data=strategies.data())(function))()


@pytest.mark.parametrize("examples", [15, *whole(60)])
def test_programs(examples):
    check(check_program, examples)


def check_program(data):
    graph = Graph(data.draw)
    device = data.draw(strategies.sampled_from(("cpu", "foo")))
    last = graph.values[-1]
    node = last.node if last.dtype == "float64" else graph.writer.cast(last.node, "float64")
    output = graph.writer.finite(node, "float64")
    captured = [it.to(device) for it in graph.captured]
    found = scores_of(
        graph.writer, output, SIZES, graph.query, graph.key, captured, torch.float64, device
    )
    exact = finite(last.exact)
    wrong = (found - exact).abs() > last.error.nan_to_num(0.0) + 1e-13 * exact.abs() + 1e-12
    assert not wrong.any(), (graph.writer.text(output), found[wrong][:3], exact[wrong][:3])


@pytest.mark.parametrize("examples", [15, *whole(60)])
def test_gradients_of_captured_tensors(examples):
    check(check_gradients_of_captured_tensors, examples)


def check_gradients_of_captured_tensors(data):
    """A random value times the score's gradient is added at random places."""
    graph = Graph(data.draw, has_grad=True)
    writer, device = graph.writer, data.draw(strategies.sampled_from(("cpu", "foo")))
    usable = [it for it in graph.values if it.dtype in FLOATS]
    usable = [it for it in usable if it.exact.isfinite().all() and it.exact.abs().max() < 1e6]
    factor = data.draw(strategies.sampled_from(usable))
    grad = next(it for it in graph.values if it.exact is graph.grad)
    # Where the query does not see the key, the gradient is zero and the factor arbitrary.
    wide = writer.cast(factor.node, "float64")
    nothing = writer.number(0.0, "float64")
    is_seen = writer.add("bool", "ne", grad.node, nothing)
    product = writer.add("float64", "mul", wide, grad.node)
    value = writer.add("float64", "where", is_seen, product, nothing)
    sizes = data.draw(strategies.lists(strategies.integers(1, 40), max_size=3))
    table = torch.zeros(sizes, dtype=torch.float64)
    indices, places = [], []
    for size in sizes:
        x = graph.pick(("int32", "int64"))
        literal = writer.integer(size, x.dtype)
        indices.append(writer.add(x.dtype, "remainder", x.node, literal))
        places.append(torch.remainder(x.exact, size).long())
    writer.gradient(len(graph.captured), value, *indices)
    graph.captured.append(table)

    captured = [it.to(device) for it in graph.captured]
    (query, key, ones, captured, *lists), options = call_of(
        writer, grad.node, SIZES, graph.query, graph.key, captured, torch.float64, device
    )
    backward = options.pop("score_mod")
    output, logsumexp = torch.ops.foo.flex_attention(query, key, ones, captured, *lists, **options)
    *_, gradients = torch.ops.foo.flex_attention_backward(
        torch.zeros_like(output), graph.grad.to(device), query, key, ones, captured, output,
        logsumexp, *lists, captured_requires_grad=[it is captured[-1] for it in captured],
        backward=backward, **options,
    )  # fmt: skip
    terms = factor.exact.double() * graph.grad
    exact = (
        torch.zeros_like(table).index_put(tuple(places), terms, accumulate=True)
        if sizes
        else terms.sum()
    )
    errors = factor.error * graph.grad.abs() + 1e-13 * terms.abs()
    room = (
        torch.zeros_like(table).index_put(tuple(places), errors, accumulate=True)
        if sizes
        else errors.sum()
    )
    wrong = (gradients[-1].cpu() - exact).abs() > 4 * room + 1e-12
    assert not wrong.any(), (backward, gradients[-1].cpu()[wrong][:3], exact[wrong][:3])
    assert all(it.numel() == 0 for it in gradients[:-1])
