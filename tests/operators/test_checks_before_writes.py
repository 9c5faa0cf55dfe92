"""Every overload of every operator writes a correct result, or refuses and writes nothing.

Valid arguments get up to two faults: another shape, dtype, device or layout, or elements that share
memory with each other or with another argument. Each tensor lies between fences. Either the call
raises an error that says what is wrong, and no byte has changed; or the written tensors equal the
results of the functional operator on copies, and all other bytes are unchanged.
"""

import dataclasses
import re

import hypothesis
import pytest
import torch
from hypothesis import strategies

from foo_ops import library, testing

pytestmark = pytest.mark.usefixtures("one_thread")

FENCE = 64
PATTERN = 0xA5
OTHER_DTYPES = (torch.float16, torch.float64, torch.int64, torch.bool)
# Subjects of torch's own error messages.
TORCH_WORDS = "size of tensor|output with shape|same device|written-to tensor|too many CPU scalars"


# ------------------------------------------------------------------------- operators of the kit


def add_scaled(x: float, y: float, factor: float = 2.0) -> float:
    return x + factor * y


def sum_and_order(x: float, y: float) -> tuple[float, bool]:
    return x + y, x > y


def scaled(input, weight, output, rows):
    for row in rows:
        x, y = input.row(row), output.row(row)
        for i in range(input.shape[-1]):
            y[i] = x[i] * weight[i]


def split(input, weight, low, high, rows):
    for row in rows:
        x = input.row(row)
        for i in range(input.shape[-1]):
            low.row(row)[i] = min(x[i], weight[i])
            high.row(row)[i] = max(x[i], weight[i])


def scaled_fake(input, weight):
    if input.dim() == 0 or weight.shape != input.shape[-1:]:
        raise ValueError(f"weight must have shape {list(input.shape[-1:])}")
    if input.is_complex() or weight.is_complex() or weight.dtype != input.dtype:
        raise TypeError("weight must have the dtype of input")
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def split_fake(input, weight):
    result = scaled_fake(input, weight)
    return result, torch.empty_like(result)


TWO = "Tensor input, Tensor weight"
OUT = "Tensor(a!) low, Tensor(b!) high"


@pytest.fixture(scope="module", autouse=True)
def lib():
    lib = library.Library("foo_property", "FRAGMENT")
    library.numba_op("foo_property::add_scaled", add_scaled, lib=lib)
    library.numba_op("foo_property::sum_and_order", sum_and_order, lib=lib)
    for name, schema, function in (
        ("scaled", f"({TWO}) -> Tensor", scaled),
        ("scaled_", "(Tensor(a!) input, Tensor weight) -> Tensor(a!)", scaled),
        ("scaled.out", f"({TWO}, *, Tensor(a!) out) -> Tensor(a!)", scaled),
        ("split", f"({TWO}) -> (Tensor, Tensor)", split),
        ("split.out", f"({TWO}, *, {OUT}) -> (Tensor(a!), Tensor(b!))", split),
    ):
        lib.define(name + schema)
        kernel = library.tile_kernel(function, contiguous_rows=name == "scaled.out")
        library.register_kernel(f"foo_property::{name}", ("cpu", "foo"), kernel, lib=lib)
    library.register_fake("foo_property::scaled", scaled_fake, lib=lib)
    library.register_fake("foo_property::split", split_fake, lib=lib)
    return lib


def pair_of_tensors(shape, other):
    return lambda: ([torch.randn(shape), torch.randn(other)], {})


KIT = {
    "add_scaled": pair_of_tensors((4, 5), (4, 5)),
    "sum_and_order": pair_of_tensors((4, 5), (5,)),
    "scaled": pair_of_tensors((4, 5), (5,)),
    "split": pair_of_tensors((4, 5), (5,)),
}


def samples():
    """Return makers of valid arguments, by the name of the functional operator."""
    found = {f"foo_property::{name}": maker for name, maker in KIT.items()}
    for spec in testing.OPERATORS:
        if not spec.mutates:
            found[spec.name] = lambda spec=spec: of_spec(spec)
    return found


def of_spec(spec):
    sample = spec.samples[max(spec.essential, key=lambda name: name == "size7")](torch.float32)
    return list(sample.inputs), dict(sample.keywords)


SAMPLES = samples()


def overloads_of(name):
    """Return the functional operator and its in-place and out variants."""
    namespace, _, packet = name.partition("::")
    namespace = getattr(torch.ops, namespace)
    found = [getattr(namespace, packet).default]
    if hasattr(namespace, packet + "_"):
        found.append(getattr(namespace, packet + "_").default)
    if "out" in getattr(namespace, packet).overloads():
        found.append(getattr(namespace, packet).out)
    return found


# --------------------------------------------------------------------------------------- memory


@dataclasses.dataclass
class Memory:
    """A buffer with fences around room for tensors."""

    buffer: torch.Tensor

    @classmethod
    def around(cls, bytes, device):
        size = 2 * FENCE + (bytes + 63) // 64 * 64
        return cls(torch.full((size,), PATTERN, dtype=torch.uint8, device=device))

    def place(self, tensor, strides, offset=0):
        """Copy a tensor to ``offset`` bytes after the fence."""
        view = torch.empty(0, dtype=tensor.dtype, device=self.buffer.device)
        start = (FENCE + offset) // tensor.element_size()
        view.set_(self.buffer.untyped_storage(), start, tensor.shape, strides)
        # Elements that share memory get the last of their values.
        flat = tensor.reshape(-1)
        places = torch.zeros(tensor.shape, dtype=torch.int64)
        for dim, stride in enumerate(strides):
            steps = torch.arange(tensor.shape[dim]) * stride
            places += steps.view(-1, *[1] * (tensor.dim() - dim - 1))
        if flat.numel() > 0:
            whole = torch.empty(0, dtype=tensor.dtype, device=self.buffer.device)
            whole.set_(self.buffer.untyped_storage(), start, (int(places.max()) + 1,), (1,))
            whole[places.reshape(-1).to(whole.device)] = flat.to(whole.device)
        return view


def contiguous_strides(shape):
    return torch.empty(shape, device="meta").stride()


def span(shape, strides):
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))


@dataclasses.dataclass
class Argument:
    """A tensor to make: its contents and its place in memory."""

    value: torch.Tensor
    device: str
    strides: tuple[int, ...]
    # The argument whose memory holds this one, and the offset in elements from its start.
    inside: int | None = None
    behind: int = 0

    @classmethod
    def of(cls, tensor, device):
        return cls(tensor, device, contiguous_strides(tensor.shape))


def changed_shape(draw, value):
    dims = value.dim()
    choices = [value.new_ones(()), value.unsqueeze(0), value.new_ones(3, 1), value.new_ones(0)]
    if dims > 0:
        choices += [value[:1], value[..., :-1], value.repeat(2, *[1] * (dims - 1))]
        choices += [torch.cat([value, value], -1), value.new_ones((2, *value.shape))]
        choices += [value[0]] if value.shape[0] else []
    return draw(strategies.sampled_from(choices)).contiguous()


def add_fault(draw, arguments):
    index = draw(strategies.integers(0, len(arguments) - 1))
    argument = arguments[index]
    shape, fault = argument.value.shape, draw(strategies.sampled_from(sorted(FAULTS)))
    if fault == "shape":
        argument.value = changed_shape(draw, argument.value)
        argument.strides = contiguous_strides(argument.value.shape)
    elif fault == "dtype":
        argument.value = argument.value.to(draw(strategies.sampled_from(OTHER_DTYPES)))
    elif fault == "device":
        argument.device = draw(strategies.sampled_from(["cpu", "foo:0", "foo:1"]))
    elif fault == "expanded" and len(shape) > 0:
        dim = draw(strategies.integers(0, len(shape) - 1))
        argument.strides = tuple(
            0 if at == dim else stride for at, stride in enumerate(argument.strides)
        )
    elif fault == "windows" and len(shape) > 0:
        argument.strides = tuple(range(len(shape), 0, -1))
    elif fault == "transposed":
        argument.strides = contiguous_strides(shape[::-1])[::-1]
    elif fault == "overlap" and len(arguments) > 1:
        others = [other for other in range(len(arguments)) if other != index]
        other = draw(strategies.sampled_from(others))
        if arguments[other].inside is None and all(a.inside != index for a in arguments):
            argument.inside, argument.device = other, arguments[other].device
            argument.behind = draw(strategies.sampled_from([0, 0, 1, 2, 5]))
    elif fault == "step":
        argument.strides = tuple(2 * stride for stride in argument.strides)


FAULTS = {"shape", "dtype", "device", "expanded", "windows", "transposed", "overlap", "step"}


def made(arguments):
    """Make the tensors and their memory."""
    roots = [i if a.inside is None else a.inside for i, a in enumerate(arguments)]
    sizes = dict.fromkeys(roots, 0)
    for root, a in zip(roots, arguments):
        end = (span(a.value.shape, a.strides) + a.behind) * a.value.element_size()
        sizes[root] = max(sizes[root], end)
    memory = {root: Memory.around(size, arguments[root].device) for root, size in sizes.items()}
    tensors = [
        memory[root].place(a.value, a.strides, a.behind * a.value.element_size())
        for root, a in zip(roots, arguments)
    ]
    return tensors, [part.buffer for part in memory.values()]


# ------------------------------------------------------------------------------------- property


def refusal_of(operator, *args, **kwargs):
    """Return the error message of a refused call."""
    try:
        operator(*args, **kwargs)
    except (ValueError, TypeError, RuntimeError, NotImplementedError, IndexError) as error:
        return str(error)
    return None


@strategies.composite
def calls(draw):
    name = draw(strategies.sampled_from(sorted(SAMPLES)))
    functional, *variants = overloads_of(name)
    # Draw variants twice as often: only operators that write matter here.
    operator = draw(strategies.sampled_from([functional, *variants, *variants]))
    torch.manual_seed(draw(strategies.integers(0, 3)))
    device = draw(strategies.sampled_from(["cpu", "foo:0"]))
    inputs, keywords = SAMPLES[name]()
    names = [a.name for a in operator._schema.arguments]
    places = [at for at, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    arguments = [Argument.of(inputs[at], device) for at in places]
    labels = [names[at] for at in places]
    outs = [a.name for a in operator._schema.arguments if a.is_out]
    if outs:
        results = functional(*inputs, **keywords)
        results = (results,) if len(outs) == 1 else results
        arguments += [Argument.of(torch.full_like(result, 3), device) for result in results]
        labels += outs
    for _ in range(draw(strategies.integers(0, 2))):
        add_fault(draw, arguments)
    return operator, functional, inputs, places, keywords, outs, arguments, labels


@hypothesis.settings(
    max_examples=600,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(call=calls())
def test_it_is_refused_and_writes_nothing_or_it_is_right(call):
    operator, functional, inputs, places, keywords, outs, arguments, labels = call
    tensors, memory = made(arguments)
    given, copies = list(inputs), list(inputs)
    for at, tensor in zip(places, tensors):
        given[at], copies[at] = tensor, tensor.clone()
    targets = dict(zip(outs, tensors[len(places) :]))
    is_written = {a.name for a in operator._schema.arguments if a.is_write}
    written = [tensor for name, tensor in zip(labels, tensors) if name in is_written]
    before = [buffer.clone() for buffer in memory]
    elements = [tensor.clone() for tensor in written]
    layouts = [(tensor.shape, tensor.stride()) for tensor in tensors]
    refusal = refusal_of(operator, *given, **keywords, **targets)
    if refusal is not None:
        assert re.search("|".join([*labels, TORCH_WORDS]), refusal), f"{operator}: {refusal}"
    else:
        results = functional(*copies, **keywords)
        results = (results,) if isinstance(results, torch.Tensor) else results
        for tensor, result in zip(written, results):
            expected = result.to(tensor.dtype)
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)
        for tensor, old in zip(written, elements):
            tensor.copy_(old)
    assert [(tensor.shape, tensor.stride()) for tensor in tensors] == layouts
    for buffer, old in zip(memory, before):
        assert torch.equal(buffer, old), f"{operator} wrote beside what it may write"
