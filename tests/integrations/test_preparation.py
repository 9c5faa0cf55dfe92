"""Loops of programs that stay from run to run, without their launchers."""

import threading
from contextlib import nullcontext

import pytest
import torch
from foo_ops._C import Number, Program, Register

import foo_ops
from foo_ops import language, library
from foo_ops.testing.checks.matrix import threads

pytestmark = pytest.mark.usefixtures("one_thread")


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def register(index):
    return Register(index)


def call(name, arguments, results, last_uses=(), overload="", **keywords):
    return (list(last_uses), name, overload, (tuple(arguments), keywords, tuple(results)))


def add(source, target, number=1.0):
    """Return a call that is no loop of ours."""
    return call("aten::add", [register(source), number], [register(target)], overload="Scalar")


def with_loop(operator, constants, count=1, **keywords):
    """Return the program of ``rms_norm(operator(input + 1, *constants))``."""
    first = 2 + len(constants)
    results = [register(first + it) for it in range(count)]
    places = range(2, first)
    arguments = [register(1), *(register(it) for it in places)]
    # The norms are outputs, so they are new each time.
    norms = [
        call("foo::rms_norm", [it], [register(it.index + count)], [it.index]) for it in results
    ]
    return Program(
        first + 2 * count,
        [0],
        [it.index + count for it in results],
        list(zip(places, constants)),
        [add(0, 1), call(operator, arguments, results, [1], **keywords), *norms],
    )


def quantized(bits, group_size=None, size=64):
    return foo_ops.quantize_weight(numbers(24, size, seed=5), bits, group_size)


WEIGHT, OTHER = numbers(24, 64, seed=1), numbers(24, 64, seed=2)
GAIN, SHIFT = numbers(64, seed=3), numbers(64, seed=4)
TABLES = numbers(2, 1, 32, seed=6).unbind(0)
LOOPS = {
    "linear": ("linear", [WEIGHT, numbers(24, seed=7)], {}, 1),
    "linear_activation": ("linear_activation", [WEIGHT, None], {"activation": "gelu"}, 1),
    "linear_silu_mul": ("linear_silu_mul", [WEIGHT, OTHER], {}, 1),
    "linear_int8": ("linear_int8", quantized(8), {}, 1),
    "linear_int8, integers": ("linear_int8", quantized(8), {"activations": 8}, 1),
    "linear_int4": ("linear_int4", quantized(4, 32), {"group_size": 32}, 1),
    "rms_norm": ("rms_norm", [GAIN], {"eps": 0.1}, 1),
    "add_rms_norm": ("add_rms_norm", [numbers(3, 64, seed=8), GAIN], {"eps": 0.1}, 2),
    "layer_norm": ("layer_norm", [GAIN, SHIFT], {"eps": 0.1}, 1),
    "add_layer_norm": ("add_layer_norm", [numbers(3, 64, seed=8), GAIN, SHIFT], {"eps": 0.1}, 2),
    "rotary_embedding": ("rotary_embedding", TABLES, {}, 1),
}
"""Operators, what follows their input of 3 rows of 64, and how many results they have."""


def called(operator, input, constants, keywords):
    results = getattr(torch.ops.foo, operator)(input, *constants, **keywords)
    return list(results) if isinstance(results, tuple) else [results]


def made(name):
    operator, constants, keywords, count = LOOPS[name]
    given = [it for it in constants if it is not None]
    return with_loop(f"foo::{operator}", given, count, **keywords)


def expected(name, input):
    operator, constants, keywords, _ = LOOPS[name]
    with torch.no_grad():
        results = called(operator, input + 1, constants, keywords)
    return [torch.ops.foo.rms_norm(it) for it in results]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_stay(name, count):
    program = made(name)
    inputs = [numbers(3, 64, seed=it) for it in range(5)]
    with threads(count):
        # Results of earlier runs are compared after later ones.
        outputs = [program.run(0, [it]) for it in inputs]
        for ours, input in zip(outputs, inputs):
            for one, other in zip(ours, expected(name, input), strict=True):
                assert torch.equal(one, other)
    assert program.lasting_calls == 1


def test_the_number_of_threads_may_change():
    program = made("linear")
    for seed, count in enumerate([1, 2, 2, 1, 1]):
        with threads(count):
            input = numbers(3, 64, seed=seed)
            assert torch.equal(program.run(0, [input])[0], expected("linear", input)[0])


def test_inputs_of_other_sizes():
    program = made("rms_norm")
    for rows in (3, 3, 5, 5, 1, 3):
        input = numbers(rows, 64, seed=rows)
        assert torch.equal(program.run(0, [input])[0], expected("rms_norm", input)[0])
    input = numbers(64, 3).t()
    # ATen keeps the strides of its argument.
    for _ in range(3):
        assert torch.equal(program.run(0, [input])[0], expected("rms_norm", input)[0])


def test_constants_that_are_written():
    weight = WEIGHT.clone()
    program = with_loop("foo::linear", [weight])
    input = numbers(3, 64)
    for _ in range(3):
        weight.mul_(-2)
        result = torch.ops.foo.rms_norm(torch.ops.foo.linear(input + 1, weight))
        assert torch.equal(program.run(0, [input])[0], result)
    assert program.lasting_calls == 1
    memory = weight.data
    # Other memory, and the same with another layout.
    for other in (numbers(24, 64, seed=9), memory.view(64, 24).t(), memory[:, :32]):
        weight.data = other
        assert program.run(0, [input]) is None


def test_copies_that_a_launcher_makes_do_not_stay():
    weight = numbers(64, 48, seed=1).t()[::2]
    program = with_loop("foo::linear_int8", [(weight * 20).to(torch.int8), numbers(24, seed=2)])
    weight = numbers(128, 24).t()[:, ::2]
    strided = with_loop("foo::linear", [weight])
    input = numbers(3, 64)
    for each in (program, strided):
        first = each.run(0, [input])[0]
        assert torch.equal(each.run(0, [input])[0], first)
    before = strided.run(0, [input])[0].clone()
    weight.zero_()
    assert not torch.equal(strided.run(0, [input])[0], before)
    assert torch.equal(strided.run(0, [input])[0], torch.zeros(3, 24))
    assert program.lasting_calls == 0


def test_calls_with_several_loops_do_not_stay():
    # Many rows are rounded in a loop of their own.
    program = with_loop("foo::linear_int8", quantized(8), activations=8)
    for seed in range(3):
        input = numbers(100, 64, seed=seed)
        result = torch.ops.foo.linear_int8(input + 1, *quantized(8), activations=8)
        assert torch.equal(program.run(0, [input])[0], torch.ops.foo.rms_norm(result))
    assert program.lasting_calls == 0


RETURNED = {
    "the result": [],
    "a view": [([], register(3), [64, 1], register(4), [3, 8], [64, 1], 2)],
    "an alias": [call("aten::_unsafe_view", [register(3), [64, 3]], [register(4)])],
    "of an alias": [
        call("aten::t", [register(3)], [register(5)]),
        call("aten::slice", [register(5), 0, 1, 9], [register(4)], overload="Tensor"),
    ],
    "in a list": [call("aten::split", [register(3), 2], [[4, 5]], overload="Tensor")],
}


def numbered(instruction):
    return tuple(
        [Number(each, 0) for each in it]
        if isinstance(it, list) and it and isinstance(it[0], int) and place > 0
        else Number(it, 0)
        if isinstance(it, int)
        else it
        for place, it in enumerate(instruction)
    )


@pytest.mark.parametrize("name", RETURNED)
def test_outputs_are_new_in_each_run(name):
    after = [numbered(it) if isinstance(it[1], Register) else it for it in RETURNED[name]]
    norm = call("foo::rms_norm", [register(1), register(2)], [register(3)])
    last = 4 if after else 3
    program = Program(6, [0], [last], [(2, GAIN)], [add(0, 1), norm, *after])
    runs = [program.run(0, [numbers(3, 64, seed=it)])[0] for it in range(4)]
    kept = [it.clone() for it in runs]
    program.run(0, [numbers(3, 64, seed=9)])
    for one, other in zip(runs, kept):
        assert torch.equal(one, other)
    assert not torch.equal(runs[0], runs[1])
    assert program.lasting_calls == 0


def test_views_of_what_stays():
    program = Program(
        9,
        [0],
        [8],
        [(2, GAIN), (5, numbers(24, 32, seed=1))],
        [
            add(0, 1),
            call("foo::rms_norm", [register(1), register(2)], [register(3)], [1]),
            numbered(([3], register(3), [64, 1], register(4), [3, 32], [64, 2], 1)),
            call("foo::linear", [register(4), register(5)], [register(6)], [4]),
            numbered(([6], register(6), [24, 1], register(7), [24, 3], [1, 24], 0)),
            call("aten::mul", [register(7), 2.0], [register(8)], [7], "Scalar"),
        ],
    )
    for seed in range(4):
        input = numbers(3, 64, seed=seed)
        normed = torch.ops.foo.rms_norm(input + 1, GAIN)
        result = torch.ops.foo.linear(normed[:, 1::2], numbers(24, 32, seed=1)).t() * 2
        assert torch.equal(program.run(0, [input])[0], result)


def test_views_that_move_with_the_position():
    sizes, strides = [Number(3, 0), Number(8, 1)], [Number(64, 0), Number(1, 0)]
    view = ([], register(3), strides, register(4), sizes, strides, Number(2, 3))
    program = Program(
        6,
        [0],
        [5],
        [(2, GAIN)],
        [
            add(0, 1),
            call("foo::rms_norm", [register(1), register(2)], [register(3)]),
            view,
            call("foo::rms_norm", [register(4)], [register(5)]),
        ],
    )
    input = numbers(3, 64)
    normed = torch.ops.foo.rms_norm(input + 1, GAIN)
    for position in (0, 0, 1, 5, 2):
        part = normed[:, 2 + 3 * position :][:, : 8 + position]
        assert torch.equal(program.run(position, [input])[0], torch.ops.foo.rms_norm(part))


def test_writes_between_loops():
    """Writing to a tensor that stays is done in each run, in order."""
    memory = torch.zeros(3, 64)
    norm = [register(1), register(2)]
    program = Program(
        8,
        [0, 7],
        [6],
        [(2, GAIN)],
        [
            add(0, 1),
            call("foo::rms_norm", norm, [register(3)]),
            call("aten::add_", [register(1), register(3)], [None], overload="Tensor"),
            call("foo::rms_norm", norm, [register(4)]),
            call("aten::mul_", [register(4), 3.0], [None], [], "Scalar"),
            call("foo::rms_norm", [register(4), register(2)], [register(5)]),
            call("aten::copy_", [register(7), register(5)], [None]),
            call("aten::add", [register(5), register(3)], [register(6)], overload="Tensor"),
        ],
    )
    for seed in range(4):
        input = numbers(3, 64, seed=seed)
        x = input + 1
        first = torch.ops.foo.rms_norm(x, GAIN)
        x = x + first
        last = torch.ops.foo.rms_norm(torch.ops.foo.rms_norm(x, GAIN) * 3, GAIN)
        assert torch.equal(program.run(0, [input, memory])[0], last + first)
        assert torch.equal(memory, last)


def test_views_of_other_operators_see_writes():
    program = Program(
        5,
        [0],
        [4],
        [(3, GAIN)],
        [
            call("aten::slice", [register(0), 0, 1, 3], [register(1)], overload="Tensor"),
            call("aten::add_", [register(0), 1.0], [None], overload="Scalar"),
            call("foo::rms_norm", [register(1), register(3)], [register(2)]),
            call("foo::rms_norm", [register(2)], [register(4)]),
        ],
    )
    for seed in range(4):
        input = numbers(3, 64, seed=seed)
        result = torch.ops.foo.rms_norm(torch.ops.foo.rms_norm(input[1:] + 1, GAIN))
        assert torch.equal(program.run(0, [input])[0], result)


def test_inputs_and_outputs_are_let_go():
    program = made("add_rms_norm")
    for seed in range(3):
        input = numbers(3, 64, seed=seed)
        storages = [it.untyped_storage() for it in (input, *program.run(0, [input]))]
        # Only the objects of Python hold them: an input with its tensor, outputs without.
        assert [torch._C._storage_Use_Count(it._cdata) for it in storages] == [2, 1, 1]


def test_memory_of_views_is_let_go():
    """The views of a cache stay for the next run, and their memory does not."""
    part = register(1), [register(0), 0, 0, Number(1, 1)]
    program = Program(
        4,
        [0],
        [3],
        [],
        [
            call("aten::slice", part[1], [part[0]], [], "Tensor"),
            call("foo::rms_norm", [register(1)], [register(2)], [1]),
            call("foo::rms_norm", [register(2)], [register(3)], [2]),
        ],
    )
    for position, dtype in ((0, torch.float32), (4, torch.float32), (2, torch.float64)):
        cache = numbers(6, 64, seed=position, dtype=dtype)
        (output,) = program.run(position, [cache])
        part_of_it = cache[: position + 1]
        assert torch.equal(output, torch.ops.foo.rms_norm(torch.ops.foo.rms_norm(part_of_it)))
        del part_of_it
        storage = cache.untyped_storage()
        assert torch._C._storage_Use_Count(storage._cdata) == 2


def test_views_that_are_outputs_are_new_in_each_run():
    operands = [register(0), 0, 0, Number(1, 1)]
    program = Program(
        3,
        [0],
        [1, 2],
        [],
        [
            call("aten::slice", operands, [register(1)], [], "Tensor"),
            numbered(([], register(0), [64, 1], register(2), [2, 32], [64, 1], 64)),
        ],
    )
    caches = [numbers(6, 64, seed=it) for it in range(4)]
    outputs = [program.run(position, [it]) for position, it in enumerate(caches)]
    for position, (it, (part, view)) in enumerate(zip(caches, outputs)):
        assert torch.equal(part, it[: position + 1])
        assert torch.equal(view, it[1:3, :32])
        assert part.data_ptr() == it.data_ptr()


def test_loops_that_read_each_other():
    """Small ones run as one step on a thread, in order; a profiler still tells them apart."""
    first, second = numbers(64, 64, seed=1), numbers(64, 64, seed=2)
    program = Program(
        8,
        [0],
        [7],
        [(2, first), (3, second)],
        [
            add(0, 1),
            call("foo::linear", [register(1), register(2)], [register(4)], [1]),
            call("foo::rms_norm", [register(4)], [register(5)], [4]),
            call("foo::linear", [register(5), register(3)], [register(6)], [5]),
            call("foo::rms_norm", [register(6)], [register(7)], [6]),
        ],
    )
    linear, norm = torch.ops.foo.linear, torch.ops.foo.rms_norm
    for seed in range(4):
        input = numbers(3, 64, seed=seed)
        expected = norm(linear(norm(linear(input + 1, first)), second))
        with torch.profiler.profile() if seed == 3 else nullcontext() as seen:
            (output,) = program.run(0, [input])
        assert torch.equal(output, expected)
    assert program.lasting_calls == 3
    names = [it.name for it in seen.events() if it.name.startswith("foo::")]
    assert names == ["foo::linear", "foo::rms_norm"] * 2


def test_results_that_change_their_sizes():
    """Only the position is another one, and the rest of the run reads the new sizes."""
    program = Program(
        6,
        [0],
        [5],
        [(2, GAIN)],
        [
            call("aten::slice", [register(0), 0, 0, Number(1, 1)], [register(1)], [], "Tensor"),
            call("aten::clone", [register(1)], [register(3)], [1]),
            call("foo::rms_norm", [register(3), register(2)], [register(4)], [3]),
            add(4, 5),
        ],
    )
    input = numbers(9, 64)
    for position in (0, 0, 1, 1, 4, 2, 2):
        result = torch.ops.foo.rms_norm(input[: position + 1], GAIN) + 1
        assert torch.equal(program.run(position, [input])[0], result)


def test_two_threads_run_a_program():
    program = made("linear_silu_mul")
    wrong = []

    def work(seed):
        for turn in range(200):
            input = numbers(3, 64, seed=1000 * seed + turn)
            ours = program.run(0, [input])[0]
            if not torch.equal(ours, expected("linear_silu_mul", input)[0]):
                wrong.append((seed, turn))

    workers = [threading.Thread(target=work, args=(it,)) for it in range(3)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert not wrong


def test_a_profiler_sees_all_calls():
    program = made("rms_norm")
    input = numbers(3, 64)
    for _ in range(2):
        program.run(0, [input])
    with torch.profiler.profile() as profile:
        ours = program.run(0, [input])
    counts = {it.key: it.count for it in profile.key_averages()}
    assert (counts["aten::add"], counts["foo::rms_norm"]) == (1, 2)
    assert torch.equal(ours[0], expected("rms_norm", input)[0])
    assert program.lasting_calls == 1


def test_after_an_error():
    program = made("linear")
    input = numbers(3, 64)
    program.run(0, [input])
    with pytest.raises(ValueError, match="linear: weight must have 32 columns as input has"):
        program.run(0, [input[:, :32]])
    assert torch.equal(program.run(0, [input])[0], expected("linear", input)[0])


def test_memory_that_stays_is_limited():
    """A sum and three of four norms of it, of 1 MB each, stay."""
    gain = numbers(1 << 10)
    norms = [
        call("foo::rms_norm", [register(1), register(2)], [register(it)], eps=it)
        for it in range(3, 7)
    ]
    again = [call("foo::rms_norm", [register(it)], [register(it + 4)]) for it in range(3, 7)]
    program = Program(11, [0], [7, 8, 9, 10], [(2, gain)], [add(0, 1), *norms, *again])
    input = numbers(256, 1 << 10)
    for _ in range(2):
        outputs = program.run(0, [input])
        for eps, ours in zip(range(3, 7), outputs, strict=True):
            norm = torch.ops.foo.rms_norm(input + 1, gain, eps=eps)
            assert torch.equal(ours, torch.ops.foo.rms_norm(norm))
    assert program.lasting_calls == 3


# ------------------------------------------------------------------------ calls on other tensors


HEADS, ROOM, WIDTH = 2, 20, 16


def with_cache(**keywords):
    """Return a program that appends keys and values to a cache, and attends to all of them."""
    rows = [2, Number(0, 0), Number(1, 1)]
    attention = [register(0), register(5), register(6)]
    return Program(
        9,
        [0, 1, 2, 3],
        [8],
        [],
        [
            call("aten::mul", [register(0), 2.0], [register(4)], [], "Scalar"),
            call("foo::cache_append", [register(it) for it in (1, 2, 4, 0, 3)], [], [4]),
            call("aten::slice", [register(1), *rows], [register(5)], [], "Tensor"),
            call("aten::slice", [register(2), *rows], [register(6)], [], "Tensor"),
            call("foo::attention", attention, [register(7), None], [5, 6], **keywords),
            call("foo::rms_norm", [register(7)], [register(8)], [7]),
        ],
    )


def caches_of(make, batch=2):
    return [make(batch, HEADS, ROOM, WIDTH) for _ in range(2)]


def by_rows(*shape):
    """Make a cache whose heads are adjacent, as some models have it."""
    batch, heads, room, width = shape
    return torch.zeros(batch, room, heads, width).transpose(1, 2)


def attended(caches, query, position, **keywords):
    """Do what the program of `with_cache` does."""
    first = torch.full((len(query),), position)
    torch.ops.foo.cache_append(*caches, 2 * query, query.clone(), first)
    keys, values = (it[:, :, : position + 1] for it in caches)
    output = torch.ops.foo.attention(query, keys, values, **keywords)[0]
    return torch.ops.foo.rms_norm(output)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("keywords", [{}, {"scale": 0.3}, {"softcap": 2.0}, {"window_left": 3}])
def test_calls_on_caches_stay(keywords, count):
    program = with_cache(**keywords)
    ours, theirs = caches_of(torch.zeros), caches_of(torch.zeros)
    with threads(count):
        for position in range(ROOM):
            query = numbers(2, HEADS, 1, WIDTH, seed=position)
            first = torch.full((2,), position)
            result = program.run(position, [query, *ours, first])[0]
            assert torch.equal(result, attended(theirs, query, position, **keywords))
            assert all(map(torch.equal, ours, theirs))
    assert program.lasting_calls == 2


def test_caches_may_be_others():
    program = with_cache()
    made = [
        *(caches_of(torch.zeros), caches_of(by_rows), caches_of(torch.zeros)),
        *(caches_of(torch.zeros, 1), caches_of(by_rows, 3)),
    ]
    # Also taking turns, and from another position on.
    for turn in range(3 * len(made)):
        number = turn % len(made)
        caches, position = made[number], turn // len(made) * 2
        copies = [it.clone() for it in caches]
        query = numbers(len(caches[0]), HEADS, 1, WIDTH, seed=turn)
        first = torch.full((len(query),), position)
        result = program.run(position, [query, *caches, first])[0]
        assert torch.equal(result, attended(copies, query, position))
        assert all(map(torch.equal, caches, copies))


def test_caches_are_let_go():
    program = with_cache()
    for position in range(3):
        caches = caches_of(torch.zeros)
        query = numbers(2, HEADS, 1, WIDTH)
        program.run(position, [query, *caches, torch.full((2,), position)])
        storages = [it.untyped_storage() for it in (query, *caches)]
        del query, caches
        assert [torch._C._storage_Use_Count(it._cdata) for it in storages] == [1, 1, 1]


def test_caches_that_share_memory():
    program = with_cache()
    apart = caches_of(torch.zeros)
    query = numbers(2, HEADS, 1, WIDTH)
    for position in range(2):
        program.run(position, [query, *apart, torch.full((2,), position)])
    one = torch.zeros(2, HEADS, ROOM, WIDTH)
    with pytest.raises(RuntimeError, match="value_cache must not share memory with key_cache"):
        program.run(2, [query, one, one, torch.full((2,), 2)])
    # A value that lies in a cache is read before anything is written.
    inside = apart[0][:, :, 2:3]
    inside.copy_(query)
    copies = [it.clone() for it in apart]
    torch.ops.foo.cache_append(*copies, 2 * query, query, torch.full((2,), 2))
    program.run(2, [inside, *apart, torch.full((2,), 2)])
    assert all(map(torch.equal, apart, copies))


def test_positions_outside_of_a_cache():
    program = with_cache()
    caches, query = caches_of(torch.zeros), numbers(2, HEADS, 1, WIDTH)
    for _ in range(2):
        program.run(0, [query, *caches, torch.zeros(2, dtype=torch.long)])
    before = [it.clone() for it in caches]
    with pytest.raises(ValueError, match=r"cache_append: positions must be in \[0, 19\].* got 20"):
        program.run(0, [query, *caches, torch.tensor([3, ROOM])])
    assert all(map(torch.equal, caches, before))
    first = torch.tensor([1, 4])
    program.run(0, [query, *caches, first])
    assert torch.equal(caches[1][[0, 1], :, first], query[:, :, 0])


def test_a_cache_that_copies_on_write():
    program = with_cache()
    caches, query = caches_of(torch.zeros), numbers(2, HEADS, 1, WIDTH)
    for position in range(2):
        program.run(position, [query, *caches, torch.full((2,), position)])
    lazy = torch._lazy_clone(caches[0])
    before = lazy.clone()
    for position in range(2, 4):
        program.run(position, [query, *caches, torch.full((2,), position)])
    assert torch.equal(lazy, before)
    assert torch.equal(caches[0][:, :, 3], 2 * query[:, :, 0])


@library.tile_kernel
def scale_rows(x, factor, shift, rows):
    for row in rows:
        line = x.row(row)
        for i in range(x.shape[-1]):
            line[i] = line[i] * language.load(factor.data, 0)
            if shift is not None:
                line[i] = line[i] + shift[i]


@pytest.fixture(scope="module")
def scale_():
    name = "foo_preparation::scale_"
    library.define(name, "(Tensor(a!) x, Tensor factor, Tensor? shift=None) -> ()")
    library.register_kernel(name, "cpu", scale_rows)
    library.register_fake(name, lambda x, factor, shift=None: None)
    return name


@pytest.mark.parametrize("has_shift", [False, True])
def test_calls_of_operators_that_only_write_stay(scale_, has_shift):
    given = [register(it) for it in range(2 + has_shift)]
    scale = call(scale_, given, [])
    program = Program(4, [0, 1, 2][: 2 + has_shift], [3], [], [scale, add(0, 3)])
    for seed in range(5):
        x, factor, shift = numbers(3, 8, seed=seed), torch.tensor(seed - 2.0), numbers(8, seed=9)
        expected = x * factor + (shift if has_shift else 0)
        inputs = [x, factor, shift][: 2 + has_shift]
        assert torch.equal(program.run(0, inputs)[0], expected + 1)
        assert torch.equal(x, expected)
        storages = [it.untyped_storage() for it in inputs]
        del x, factor, shift, inputs
        assert {torch._C._storage_Use_Count(it._cdata) for it in storages} == {1}
    assert program.lasting_calls == 1


# ----------------------------------------------------------- results that depend on the position


def with_tables(*changes, outputs=(6,)):
    """Return a program of ``rms_norm(rms_norm(cos((1 + 3 * position) * angles), input + 1))``."""
    return Program(
        8,
        [0],
        list(outputs),
        [(2, ANGLES)],
        [
            call("aten::mul", [register(2), Number(1, 3)], [register(3)], [], "Scalar"),
            call("aten::cos", [register(3)], [register(4)], [3]),
            *changes,
            add(0, 1),
            call("foo::rms_norm", [register(4), register(1)], [register(5)]),
            call("foo::rms_norm", [register(5)], [register(6)], [5]),
        ],
    )


ANGLES = torch.linspace(0, 2, 64)


def tables(position, factor=1.0):
    return torch.cos(factor * ANGLES * (1 + 3 * position))


def run_and_count(program, position, *inputs):
    with torch.profiler.profile() as profile:
        outputs = program.run(position, [*inputs])
    return outputs, sum(it.count for it in profile.key_averages() if it.key == "aten::cos")


def test_results_of_a_position_are_kept():
    program = with_tables()
    counts = []
    for turn, position in enumerate([0, 1, 2, 1, 1, 2, 5, 5]):
        input = numbers(64, seed=turn)
        (ours,), count = run_and_count(program, position, input)
        result = torch.ops.foo.rms_norm(torch.ops.foo.rms_norm(tables(position), input + 1))
        assert torch.equal(ours, result)
        counts.append(count)
    # The first run finds out where the results stay.
    assert counts == [1, 1, 1, 0, 0, 0, 1, 0]


def test_constants_of_results_that_are_kept():
    input = numbers(64)
    angles = ANGLES.clone()
    try:
        program = with_tables()
        for factor, expected in ((1.0, [1, 1, 0, 0]), (2.0, [1, 0, 0]), (-3.0, [1, 0])):
            # The version of a tensor says nothing about this.
            ANGLES.data.copy_(angles * factor)
            counts = []
            for _ in expected:
                (ours,), count = run_and_count(program, 4, input)
                counts.append(count)
                table = torch.cos(angles * factor * 13)
                result = torch.ops.foo.rms_norm(torch.ops.foo.rms_norm(table, input + 1))
                assert torch.equal(ours, result)
            assert counts == expected
    finally:
        ANGLES.copy_(angles)


CHANGES = {
    "written": [call("aten::mul_", [register(4), 0.5], [None], [], "Scalar")],
    "a view is written": [
        call("aten::view", [register(4), [8, 8]], [register(7)]),
        call("aten::mul_", [register(7), 0.5], [None], [7], "Scalar"),
    ],
    "random": [call("aten::dropout", [register(4), 0.0, True], [register(4)])],
}


@pytest.mark.parametrize("name", CHANGES)
def test_results_that_are_not_kept(name):
    program = with_tables(*CHANGES[name])
    input = numbers(64)
    factor = 1.0 if name == "random" else 0.5
    for _ in range(4):
        (ours,), _ = run_and_count(program, 3, input)
        table = torch.ops.foo.rms_norm(factor * tables(3), input + 1)
        assert torch.equal(ours, torch.ops.foo.rms_norm(table))


@pytest.mark.parametrize("returned", ["read by others, too", "read by nothing else"])
def test_outputs_of_a_position_are_new(returned):
    sine = call("aten::sin", [register(4)], [register(7)])
    is_read = returned == "read by others, too"
    program = with_tables(outputs=(6, 4)) if is_read else with_tables(sine, outputs=(6, 7))
    for _ in range(4):
        (_, table), _ = run_and_count(program, 3, numbers(64))
        assert torch.equal(table, tables(3) if is_read else tables(3).sin())
        table.zero_()


def test_starting_over_without_results_of_the_position():
    """Later instructions read what was left out."""
    program = Program(
        9,
        [0],
        [8],
        [(2, ANGLES)],
        [
            call("aten::mul", [register(2), Number(1, 3)], [register(3)], [], "Scalar"),
            call("aten::clone", [register(0)], [register(1)]),
            call("foo::rms_norm", [register(1)], [register(4)], [1]),
            call("aten::cos", [register(3)], [register(5)], [3]),
            call("foo::rms_norm", [register(5)], [register(6)], [5]),
            call("aten::add", [register(4), register(6)], [register(8)], [4, 6], "Tensor"),
        ],
    )
    for rows in (1, 1, 1, 2, 2, 2, 3, 1, 1):
        input = numbers(rows, 64, seed=rows)
        result = torch.ops.foo.rms_norm(input) + torch.ops.foo.rms_norm(tables(3))
        assert torch.equal(program.run(3, [input])[0], result)


@pytest.mark.parametrize("count", [1, 2])
def test_starting_over_in_order(count):
    """Loops of one step that have been left out read each other."""
    rows = 250
    norms = [call("foo::rms_norm", [register(it)], [register(it + 1)], [it]) for it in (5, 6, 7, 8)]
    program = Program(
        13,
        [0],
        [12],
        [(2, ANGLES)],
        [
            call("aten::mul", [register(2), Number(1, 3)], [register(3)], [], "Scalar"),
            call("aten::cos", [register(3)], [register(4)], [3]),
            call("aten::repeat", [register(4), [rows, 1]], [register(5)], [4]),
            *norms,
            call("aten::clone", [register(0)], [register(10)]),
            call("foo::rms_norm", [register(10)], [register(11)], [10]),
            call("aten::add", [register(11), register(9)], [register(12)], [9, 11], "Tensor"),
        ],
    )
    norm = torch.ops.foo.rms_norm
    with threads(count):
        for position in [3, 5] * 5:
            table = norm(norm(norm(norm(tables(position).repeat(rows, 1)))))
            for size in (1, 1, 1, rows):
                input = numbers(size, 64, seed=size)
                assert torch.equal(program.run(position, [input])[0], norm(input) + table)


def with_integers(*chosen, kept=3):
    """Return a program of ``rms_norm(rms_norm(cos(angles * integers), input + 1))``.

    Args:
        chosen: calls that compute register 3, the integers, from register 1.
        kept: the register of the integers.
    """
    return Program(
        10,
        [0, 1],
        [9],
        [(2, ANGLES)],
        [
            *chosen,
            call("aten::mul", [register(2), register(kept)], [register(4)], [], "Tensor"),
            call("aten::cos", [register(4)], [register(5)], [4]),
            add(0, 6),
            call("foo::rms_norm", [register(5), register(6)], [register(8)]),
            call("foo::rms_norm", [register(8)], [register(9)], [8]),
        ],
    )


CHOSEN = {
    "an input": (with_integers(kept=1), 1),
    "the last of many": (
        with_integers(
            call("aten::slice", [register(1), 0, -1, 2**63 - 1, 1], [register(7)], [], "Tensor"),
            call("aten::clone", [register(7)], [register(3)], [7]),
        ),
        40,
    ),
    "a sum": (with_integers(call("aten::sum", [register(1)], [register(3)])), 20),
}


def result_of_integers(integers, input):
    table = torch.cos(ANGLES * integers)
    return torch.ops.foo.rms_norm(torch.ops.foo.rms_norm(table, input + 1))


@pytest.mark.parametrize("name", CHOSEN)
def test_results_of_integers_are_kept(name):
    """With the same integers there are the same results, whichever tensor has them."""
    program, length = CHOSEN[name]
    integers, counts = torch.zeros(length, dtype=torch.int64), []
    for turn, value in enumerate([5, 5, 7, 5, 7, 7, -2, 5]):
        integers[-1] = value
        given, input = integers if turn % 2 else integers.clone(), numbers(64, seed=turn)
        (ours,), count = run_and_count(program, 3, input, given)
        counts.append(count)
        assert torch.equal(ours, result_of_integers(value, input))
    assert counts == [1, 1, 1, 0, 0, 0, 1, 0]


def test_integers_of_other_sizes():
    program = with_integers(kept=1)
    for turn, sizes in enumerate(
        [(1,), (1,), (1, 1), (1, 1), (2, 1), (2, 1), (17, 1), (17, 1), (1,)]
    ):
        integers, input = torch.full(sizes, 3), numbers(64, seed=turn)
        assert torch.equal(
            program.run(3, [input, integers])[0], result_of_integers(integers, input)
        )


def test_integers_that_are_written():
    """They are no key: what is written to them is not known when keys are read."""
    first, second = (
        call("aten::slice", [register(1), 0, it, it + 1, 1], [register(7)], [], "Tensor")
        for it in (0, 1)
    )
    program = with_integers(
        first,
        call("aten::clone", [register(7)], [register(3)], [7]),
        second,
        call("aten::add_", [register(3), register(7)], [None], [7], "Tensor"),
    )
    input = numbers(64)
    for added in (1, 1, 1, 4, 4, 4, 1):
        found = program.run(3, [input, torch.tensor([2, added])])[0]
        assert torch.equal(found, result_of_integers(2 + added, input))


def test_results_that_other_operators_read():
    """They are computed each time, and those that only loops read are kept."""
    program = Program(
        12,
        [0, 1],
        [7, 8],
        [(2, ANGLES)],
        [
            call("aten::mul", [register(2), register(1)], [register(3)], [], "Tensor"),
            call("aten::cos", [register(3)], [register(4)], [3]),
            call("aten::mul", [register(2), register(1)], [register(10)], [], "Tensor"),
            call("aten::sin", [register(10)], [register(5)], [10]),
            add(0, 6),
            call("foo::rms_norm", [register(5), register(6)], [register(9)], [5, 6]),
            call("foo::rms_norm", [register(9)], [register(7)], [9]),
            call("aten::add", [register(4), register(0)], [register(11)], [4], "Tensor"),
            call("foo::rms_norm", [register(11)], [register(8)], [11]),
        ],
    )
    counts = []
    for turn in range(4):
        input = numbers(64, seed=turn)
        with torch.profiler.profile() as profile:
            normed, sum_normed = program.run(3, [input, torch.tensor([2])])
        names = [it.key for it in profile.key_averages()]
        counts.append((names.count("aten::cos"), names.count("aten::sin")))
        table = torch.ops.foo.rms_norm((2 * ANGLES).sin(), input + 1)
        assert torch.equal(normed, torch.ops.foo.rms_norm(table))
        assert torch.equal(sum_normed, torch.ops.foo.rms_norm((2 * ANGLES).cos() + input))
    assert counts == [(1, 1), (1, 1), (1, 0), (1, 0)]


def test_starting_over_without_results_of_integers():
    """Calls that were left out read integers that another call has read last."""
    program = Program(
        13,
        [0, 1],
        [12],
        [(2, ANGLES)],
        [
            call("aten::sum", [register(1)], [register(7)]),
            call("aten::mul", [register(2), register(7)], [register(3)], [], "Tensor"),
            call("aten::add", [register(0), register(7)], [register(9)], [7], "Tensor"),
            call("aten::clone", [register(0)], [register(10)]),
            call("foo::rms_norm", [register(10)], [register(4)], [10]),
            call("aten::cos", [register(3)], [register(5)], [3]),
            call("foo::rms_norm", [register(5)], [register(6)], [5]),
            call("aten::add", [register(4), register(6)], [register(11)], [4, 6], "Tensor"),
            call("aten::add", [register(11), register(9)], [register(8)], [9, 11], "Tensor"),
            call("foo::rms_norm", [register(8)], [register(12)], [8]),
        ],
    )
    for rows in (1, 1, 1, 2, 2, 2, 3, 1, 1):
        input, integers = numbers(rows, 64, seed=rows), torch.full((20,), 2)
        table = torch.ops.foo.rms_norm(torch.cos(ANGLES * 40))
        total = torch.ops.foo.rms_norm(input) + table + (input + 40)
        expected = torch.ops.foo.rms_norm(total)
        assert torch.equal(program.run(3, [input, integers])[0], expected)
