"""Programs that are made from recordings of a call at three positions."""

from functools import partial

import pytest
import torch
from foo_ops._C import Changes, Number, Program, Register, Snapshot, are_calls_seen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import foo_ops
from foo_ops.integrations.transformers.recording import (
    Line,
    NotRecordedError,
    Recording,
    make_program,
    merged,
)
from foo_ops.testing.checks.matrix import threads

POSITIONS = (3, 4, 7)


def recorded(function, *inputs, positions=POSITIONS):
    """Record ``function(position, *inputs)``, and return its program."""
    recordings, outputs = [], []
    for position in positions:
        with torch.no_grad(), Recording(inputs) as recording:
            results = function(position, *inputs)
        outputs.append([recording.name_of(it) for it in results])
        recordings.append(recording)
    return make_program(recordings, positions, outputs[0])


def run(made, position, *inputs):
    program, used = made
    return program.run(position, [inputs[it] for it in used])


def check(function, *inputs, others=None, positions=(0, 1, 5, 20)):
    """Compare a program with its function, at other positions and with other inputs."""
    made = recorded(function, *inputs)
    for position in positions:
        given = inputs if others is None else others(position)
        with torch.no_grad():
            expected = function(position, *(it.clone() for it in given))
            ours = run(made, position, *(it.clone() for it in given))
        assert len(ours) == len(expected)
        for one, other in zip(ours, expected):
            assert one.stride() == other.stride()
            assert torch.equal(one, other)
    return made[0]


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_numbers_that_grow():
    table = numbers(64, 4)
    check(lambda position, it: [table[: position + 1].sum(0) + it], numbers(4))
    check(lambda position, it: [it + (2 * position - 5)], numbers(4))
    check(lambda position, it: [torch.arange(position, 3 * position + 2), it.exp()], numbers(4))
    check(lambda position, it: [torch.full((position + 1, 2), position) * it], numbers(2))


def test_lists_of_tensors_and_numbers():
    check(
        lambda position, a, b: [torch.cat([a, b.expand(position + 1, 4)])],
        numbers(2, 4),
        numbers(4),
    )
    check(lambda position, a: [*(a + 1).split([1, 3], 1)], numbers(2, 4))
    check(lambda position, a: [(a + 1).unbind(1)[2] * 2], numbers(2, 4))
    check(lambda position, a: list(torch.topk(a, 2)), numbers(2, 4))
    check(lambda position, a, b: [a[:, b]], numbers(2, 4), torch.tensor([2, 0]))


def test_views_of_computed_tensors():
    def function(position, a):
        b = a * 2
        c = b.view(2, 2, 4).transpose(0, 1)[1:, :, 1::2]
        return [c + 1, c, b.as_strided((2, 3), (4, 1), 5), b.view(torch.int32)]

    program = check(function, numbers(4, 4))
    assert len(program) < 9
    check(lambda position, a: [(a * 2).expand(position + 1, 4)[-1] + 1], numbers(4))


def test_slices_of_inputs():
    """They need no dispatcher, except where an index is unusual."""
    memory = numbers(2, 9, 4)
    check(lambda position, it: [it[:, : position + 1], it[:, position:].clone()], memory)
    check(lambda position, it: [it[:, position : 2 * position]], memory)
    check(lambda position, it: [it[:, -position:] + 1], memory)
    check(lambda position, it: [it[:, position::2].sum(1)], memory)
    check(lambda position, it: [torch.ops.aten.slice.Tensor(it, -2, 0, position)], memory)
    check(lambda position, it: [it[:, -2:], it[:, -100:-1], it[:, 5:2], it[:, 7:100]], memory)
    check(lambda position, it: [it[:, position - 9 :], it[:, : position - 4]], memory)


def test_slices_of_slices_share_memory():
    memory = numbers(3, 30)
    made = recorded(lambda position, it: [it[1:][:, 2 : position + 4]], memory)
    (part,) = run(made, 11, memory)
    part.zero_()
    assert torch.equal(memory[1:, 2:15], torch.zeros(2, 13))
    assert bool((memory[0] != 0).all())


def test_fills():
    """A single int64 is written without the dispatcher."""

    def function(position, *tensors):
        for it in tensors:
            it.fill_(position)
        return [it + 1 for it in tensors]

    single, several = torch.zeros((), dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    check(function, single, several, torch.zeros(1, dtype=torch.int32), torch.zeros(1))


INTEGERS = {
    "one": lambda: torch.tensor([[7]]),
    "several": lambda: torch.arange(8).view(4, 2) * 2**61,
    "a vector": lambda: torch.arange(3),
    "a number": lambda: torch.tensor(5),
    "none": lambda: torch.empty(2, 0, dtype=torch.int64),
    "transposed": lambda: torch.arange(8).view(2, 4).T,
    "apart": lambda: torch.arange(8).view(2, 4)[:, 1:2],
    "many": lambda: torch.arange(40).view(20, 2),
    "three dimensions": lambda: torch.arange(8).view(2, 2, 2),
    "int32": lambda: torch.arange(4, dtype=torch.int32).view(2, 2),
    "float32": lambda: numbers(2, 2),
}
"""Tensors for which ATen is not asked, and others."""


@pytest.mark.parametrize("kind", INTEGERS)
def test_sums_of_integers(kind):
    it = INTEGERS[kind]()
    check(lambda position, it: [it + 1, it + position, it - 3, it + it, it + 2.5], it)
    check(lambda position, it: [torch.add(it, it, alpha=2), 1 + it, it + it[:1]], it.reshape(-1, 1))
    other = torch.ones(it.shape, dtype=torch.int32)
    check(lambda position, a, b: [a + b, a + torch.tensor(2**62)], it, other)


@pytest.mark.parametrize("kind", INTEGERS)
def test_copies_of_integers(kind):
    it = INTEGERS[kind]()
    formats = torch.contiguous_format, torch.preserve_format
    check(lambda position, it: [it.clone(memory_format=each) for each in formats], it)
    (copy,) = run(recorded(lambda position, it: [it.clone()], it), 11, it)
    assert copy.data_ptr() != it.data_ptr() or it.numel() == 0


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_side_by_side(kind):
    it = INTEGERS[kind]()
    dims = range(-it.dim(), it.dim())
    check(lambda position, it: [torch.cat((it, it + 1, it), each) for each in dims], it)
    if it.dim() == 2:
        wide = torch.arange(it.shape[0] * 50).view(it.shape[0], 50)
        check(
            lambda position, a, b: [torch.cat((a, b), 1), torch.cat((b[:, ::2], a), -1)], it, wide
        )
        check(lambda position, a, b: [torch.cat((b[:, :position], a + 1), -1)], it, wide)


def test_what_depends_on_nothing_is_computed_once():
    def function(position, it):
        rows = torch.arange(4) * 2
        return [it[rows] + torch.ones(4) + position]

    program = check(function, numbers(8))
    assert len(program) == 3  # an index and two sums


def test_what_is_written_or_returned_is_computed_each_time():
    def function(position, it):
        sums, counts, whole = torch.zeros(4), torch.zeros(2, 2), torch.ones(3)
        sums.add_(it)
        counts.view(4)[1:].add_(position)
        return [sums * 2, counts + 1, whole, whole[1:]]

    made = recorded(function, numbers(4))
    for _ in range(2):
        results = run(made, 5, numbers(4))
        assert all(map(torch.equal, results, function(5, numbers(4))))
        for it in results:
            it.zero_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_embeddings_of_a_few_tokens(dtype):
    """They need no dispatcher, except for many tokens and unusual layouts."""
    weight = numbers(30, 6).to(dtype)
    tokens = torch.tensor([[3, 29, 0], [3, 3, 1]])
    embedding = torch.nn.functional.embedding
    others = lambda position: [weight, (tokens + position) % 30]  # noqa: E731
    check(lambda position, *it: [embedding(*reversed(it))], weight, tokens, others=others)
    check(lambda position, *it: [embedding(*reversed(it))], weight[:, ::2], tokens)
    check(lambda position, *it: [embedding(*reversed(it))], weight.T, tokens[:, :1] // 29)
    check(lambda position, *it: [embedding(*reversed(it))], weight, tokens.T)
    check(lambda position, *it: [embedding(*reversed(it))], weight, tokens.int())
    check(lambda position, *it: [embedding(*reversed(it))], weight, tokens.repeat(1, 9))
    check(lambda position, *it: [embedding(*reversed(it))], weight, tokens[:, :0])


@pytest.mark.parametrize("token", [-1, 30])
def test_a_token_outside_of_the_embedding_is_refused(token):
    made = recorded(
        lambda position, *it: [torch.nn.functional.embedding(*reversed(it))],
        numbers(30, 6),
        torch.tensor([3]),
    )
    with pytest.raises(IndexError, match="out of range"):
        run(made, 5, numbers(30, 6), torch.tensor([token]))


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_sum_and_its_norm_are_one_operator(norm):
    def function(position, a, b, weight):
        total = a + b
        return [getattr(torch.ops.foo, norm)(total, weight), total * position]

    a, b, weight = numbers(3, 64).bfloat16(), numbers(1, 64).bfloat16(), numbers(64).bfloat16()
    assert len(check(function, a, a * 2, weight)) == 2
    # An addition that broadcasts, one whose result has other strides, and one of a number stay.
    assert len(check(function, a, b, weight)) == 3
    permuted = numbers(4, 3, 64).bfloat16().transpose(0, 1)
    assert len(check(function, permuted, permuted * 2, weight)) == 3
    check(lambda _, a, weight: [getattr(torch.ops.foo, norm)(a + 1, weight)], a, weight)


WEIGHTS = {
    "float32": lambda weight: partial(torch.ops.foo.linear, weight=weight),
    "bfloat16": lambda weight: partial(torch.ops.foo.linear, weight=weight.bfloat16()),
    "8 bits": lambda weight: with_integers(torch.ops.foo.linear_int8, weight, 8),
    "8 bits, integers": lambda weight: with_integers(
        torch.ops.foo.linear_int8, weight, 8, activations=8
    ),
    "4 bits": lambda weight: with_integers(torch.ops.foo.linear_int4, weight, 4, group_size=32),
}


def with_integers(operator, weight, bits, **options):
    quantized = foo_ops.quantize_weight(weight, bits, *(32,) * (bits == 4))
    return lambda input: operator(input, *quantized, **options)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_products_of_one_input_run_together(kind, rows, count):
    query, key, value, output = (WEIGHTS[kind](numbers(size, 64)) for size in (64, 32, 32, 64))

    def function(position, a):
        first = query(a).view(rows, 2, 32) * position
        keys, values = key(a).view(rows, 1, 32), value(a)
        # Reads a result of the others.
        last = output(first.reshape(rows, 64))
        return [first + keys, values, last]

    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    with threads(count):
        check(function, numbers(rows, 64).to(dtype))
        # Copies of an input live as long as the products that wait.
        strided = numbers(64, rows).to(dtype).t()
        check(function, strided, others=lambda position: [strided])


def test_products_beside_writes_stay_in_order():
    weight, other = numbers(4, 4), numbers(4, 4)
    memory = numbers(2, 4)

    def function(position, a):
        first = torch.ops.foo.linear(a, weight)
        memory.add_(first).mul_(0.5)
        # It writes between two products of its input.
        a = torch.ops.foo.linear(memory, weight)
        memory.add_(1)
        return [a, torch.ops.foo.linear(memory, other)]

    made = recorded(function, numbers(2, 4))
    with torch.no_grad():
        before = memory.clone()
        expected = [it.clone() for it in function(9, numbers(2, 4))]
        memory.copy_(before)
        ours = run(made, 9, numbers(2, 4))
    for one, of_function in zip(ours, expected):
        assert torch.equal(one, of_function)


def test_products_of_results_of_products():
    # The first takes longer than another thread takes to begin.
    first, second = numbers(4096, 256), numbers(8, 4096)
    # Memory that is reused holds other numbers.
    inputs = numbers(100, 1, 256)

    def function(position, a):
        return [torch.ops.foo.linear(torch.ops.foo.linear(a, first), second)]

    with threads(2):
        check(function, inputs[0], others=lambda it: [inputs[it]], positions=range(100))


def test_products_with_computed_weights():
    first, second = numbers(64, 64), numbers(64, 64)

    def function(position, a):
        b = torch.ops.foo.linear(a, first)
        # It is not there when the first product runs.
        weight = second * position
        return [b, torch.ops.foo.linear(a, weight)]

    check(function, numbers(1, 64))


def test_an_error_in_products_that_wait():
    weight, wrong = numbers(64, 64), numbers(64, 32)
    program = Program(
        5,
        [0],
        [3, 4],
        [(1, weight), (2, wrong)],
        [
            ([], "foo::linear", "", ((Register(0), Register(1)), {}, (Register(3),))),
            ([], "foo::linear", "", ((Register(0), Register(2)), {}, (Register(4),))),
        ],
    )
    with threads(2):
        with pytest.raises(ValueError, match="weight must have 64 columns as input has, got 32"):
            program.run(0, [numbers(1, 64)])
        # No product waits for ever.
        input = numbers(1, 64)
        expected = torch.nn.functional.linear(input.double(), weight.double())
        torch.testing.assert_close(
            torch.ops.foo.linear(input, weight).double(), expected, rtol=1e-4, atol=1e-4
        )


def test_views_of_inputs_may_have_other_strides():
    def others(position):
        return [numbers(6 + position, 5).t()[:4, :5]]

    check(lambda position, a: [a.t()[1:] * 2, a.transpose(0, 1)], numbers(4, 5), others=others)


def test_a_computed_tensor_with_other_strides():
    """It ends the run: a view's numbers would be wrong."""
    made = recorded(lambda position, a: [(a * 2).t()[1:]], numbers(4, 5))
    assert run(made, 1, numbers(4, 5)) is not None
    assert run(made, 1, numbers(5, 4).t()) is None


def test_writes():
    memory = torch.zeros(8, 4)

    def function(position, memory, a):
        memory[position % 8].copy_(a)
        memory.add_(1)
        b = a * 3
        b[1:].zero_()
        return [b, memory.sum(0), memory]

    positions = (1, 2, 3)
    made = recorded(function, memory, numbers(4), positions=positions)
    for position in (0, 5):
        ours, theirs = torch.zeros(8, 4), torch.zeros(8, 4)
        results = run(made, position, ours, numbers(4))
        for one, other in zip(results, function(position, theirs, numbers(4))):
            assert torch.equal(one, other)
        assert results[2] is not None
        assert torch.equal(ours, theirs)


def test_calls_whose_results_nothing_reads_are_left_out():
    def function(position, a):
        torch.exp(a)
        a.sin().cos()
        return [a + 1]

    assert len(check(function, numbers(4))) == 1


def test_random_numbers():
    def function(position, a):
        torch.rand(3)
        return [torch.rand_like(a)]

    made = recorded(function, numbers(4))
    torch.manual_seed(0)
    (ours,) = run(made, 0, numbers(4))
    torch.manual_seed(0)
    assert torch.equal(ours, function(0, numbers(4))[0])


def test_constants():
    weight, scale = numbers(4, 4), torch.nn.Parameter(numbers(4))
    made = recorded(lambda position, a: [a @ weight * scale + torch.tensor(2.5)], numbers(4))
    with torch.no_grad():
        weight.mul_(2)  # read as they are
        (ours,) = run(made, 0, numbers(4))
        assert torch.equal(ours, numbers(4) @ weight * scale + 2.5)
        scale.data = scale.data.double()
    assert run(made, 0, numbers(4)) is None


def test_guards():
    """Numbers that Python reads; those that grow with the position may be read as well."""

    def function(position, a, b):
        if (a.sum() > 0).item():
            return [a * 2 + b.size(0)]
        return [a * 3]

    made = recorded(function, torch.ones(4), numbers(3))
    assert torch.equal(run(made, 9, torch.ones(4), numbers(3))[0], torch.full((4,), 5.0))
    assert run(made, 9, -torch.ones(4), numbers(3)) is None

    def positions(position, a, b):
        return [a[: b.item() + position]]

    made = recorded_with_own(positions)
    assert len(run(made, 5, numbers(20), torch.tensor(5))[0]) == 10
    assert run(made, 5, numbers(20), torch.tensor(6)) is None


def recorded_with_own(function):
    """Record with an input that has the position."""
    recordings = []
    for position in POSITIONS:
        inputs = numbers(20), torch.tensor(position)
        with Recording(inputs) as recording:
            (result,) = function(position, *inputs)
        name = recording.name_of(result)
        recordings.append(recording)
    return make_program(recordings, POSITIONS, [name])


def test_guards_come_before_writes():
    """A guard that fails has changed nothing."""

    def function(position, memory, a):
        memory.add_(1)
        b = a.sum()
        return [memory * (2 if (b > 0).item() else 3)]

    memory = torch.zeros(4)
    made = recorded(function, memory, torch.ones(4))
    before = memory.clone()
    assert run(made, 0, memory, -torch.ones(4)) is None
    assert torch.equal(memory, before)
    assert run(made, 0, memory, torch.ones(4)) is not None
    assert torch.equal(memory, before + 1)


FIXED = torch.ones(4)


class Square(torch.Tensor):
    """A subclass."""


REFUSED = {
    "its operators depend on more than the position": lambda position, a: [
        a.clamp(0 if position == 3 else 0.5)
    ],
    "the number of its operators changes": lambda position, a: [
        a if position == 3 else a.exp().log()
    ],
    "its operators change": lambda position, a: [a.exp() if position == 3 else a.log()],
    "a number does not grow with the position": lambda position, a: [a + position**2],
    "a number changes, and is no integer": lambda position, a: [a * (position / 2)],
    "its lists change their lengths": lambda position, a: [a.expand(*[1] * position, 4)],
    "the number of its tensors changes": lambda position, a: [a + (a if position == 3 else FIXED)],
    "it makes tensors from numbers that change": lambda position, a: [
        a + torch.tensor([float(position)] * 4)
    ],
    "it reads a tensor by tolist": lambda position, a: [a * a.tolist()[0]],
    "it reads a tensor by numpy": lambda position, a: [a * float(a.numpy()[0])],
    "it uses a tensor of class Square": lambda position, a: [
        a + torch.ones(4).as_subclass(Square).as_subclass(Square)
    ],
    "it writes to a tensor that is replaced": lambda position, a: [torch.tensor([0.0] * 4).add_(a)],
    "it reads numbers after it has written some": lambda position, a: [a.mul_(1) * a.sum().item()],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason):
    with pytest.raises(NotRecordedError) as refusal:
        recorded(REFUSED[reason], torch.ones(4))
    assert str(refusal.value) == reason


def test_lines():
    assert merged([2, (5, "a")], [4, (5, "a")], (1, 2)) == [Line(0, 2), [5, "a"]]
    assert Line.through(10, 4, (2, 4)) == Line(16, -3)
    assert Line(16, -3).at(5) == 1
    with pytest.raises(NotRecordedError):
        Line.through(1, 2, (0, 2))


def test_the_number_of_inputs():
    program = Program(1, [0], [0], [], [])
    assert program.run(0, [torch.ones(1)])[0].item() == 1
    with pytest.raises(ValueError, match="program: inputs must be 1 tensors, got 2"):
        program.run(0, [torch.ones(1), torch.ones(1)])
    assert Number(3, 2).at(4) == 11
    assert Register(5).index == 5


def test_errors_of_operators_pass():
    made = recorded(lambda position, a: [a[torch.full((1,), position)]], torch.ones(8))
    with pytest.raises(IndexError, match="index 8 is out of bounds"):
        run(made, 8, torch.ones(8))


def test_snapshots():
    tensor, values = torch.ones(2), [1, {"a": 2}]
    content = {"tensor": tensor, "values": values}
    snapshot = Snapshot([content, values, values[1]], [tensor])
    assert snapshot.holds()
    for change in (
        lambda: content.update(more=None),
        lambda: content.pop("more"),
        lambda: values.append(3),
        lambda: values[1].update(a=300),
        lambda: content.update(tensor=torch.ones(2)),
        lambda: tensor.add_(1),
    ):
        before = change()
        assert not snapshot.holds(), before
        snapshot.take()
        assert snapshot.holds()


def test_snapshots_of_classes():
    class Layer:
        forward = 1

    snapshot = Snapshot([Layer], [])
    assert snapshot.holds()
    Layer.forward = 2
    assert not snapshot.holds()
    with pytest.raises(TypeError) as refusal:
        Snapshot([(1, 2)], [])
    assert str(refusal.value) == (
        "Snapshot: containers must be dicts, lists and classes, got tuple"
    )


def test_changes_of_a_call():
    content, values = {"keys": None, "length": 7}, [None, 3]
    changes = Changes(
        [(content, "keys", 1), (values, 0, 0)],
        [(content, "length", Number(2, 1)), (values, 1, Number(5, 0))],
    )
    outputs = [torch.ones(2), torch.zeros(3)]
    changes.write(outputs, 2**40)
    assert content["keys"] is outputs[1]
    assert content["length"] == 2**40 + 2
    assert values[0] is outputs[0]
    assert values[1] == 5
    changes.write(outputs[::-1], 0)
    assert content["keys"] is outputs[0]
    assert content["length"] == 2
    with pytest.raises(IndexError):
        changes.write(outputs[:1], 0)


class DispatchMode(TorchDispatchMode):
    pass


class FunctionMode(TorchFunctionMode):
    pass


@pytest.mark.parametrize(
    "context",
    [
        torch.enable_grad,
        lambda: torch.autocast("cpu"),
        lambda: torch.autocast("foo"),
        DispatchMode,
        FunctionMode,
    ],
    ids=["gradients", "autocast", "autocast of foo", "dispatch mode", "function mode"],
)
def test_what_sees_calls(context):
    with torch.no_grad():
        assert not are_calls_seen()
        with context():
            assert are_calls_seen()
        assert not are_calls_seen()


def test_transforms_and_tracing_see_calls():
    seen = []

    def function(x):
        seen.append(are_calls_seen())
        return x + 1

    with torch.no_grad():
        torch.vmap(function)(torch.ones(2))
        torch.func.functionalize(function)(torch.ones(2))
        torch.jit.trace(function, torch.ones(2), check_trace=False)
        assert seen == [True] * 3
        function(torch.ones(2))
    assert seen[3:] == [False]
