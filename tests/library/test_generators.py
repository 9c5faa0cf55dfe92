"""Operators with a generator: each call draws a seed as torch's own operators do."""

import re

import pytest
import torch

from foo_ops import language, library

SCHEMA = "(Tensor input, Generator? generator=None) -> (Tensor output, Tensor seed)"
NAME = "foo_generators::noise"
library.define(NAME, SCHEMA)


@library.register_fake(NAME)
def fake(input, generator=None):
    assert generator is None, "what a fake kernel says must not depend on the generator"
    if input.dim() == 0:
        raise ValueError("noise: input must have a dimension, got none")
    return torch.empty_like(input), input.new_empty((), dtype=torch.int64)


def keep_seed(seed, saved):
    saved.flat[0] = seed


@library.register_kernel(NAME, ("cpu", "foo"))
@library.tile_kernel(
    finish=keep_seed,
    check=lambda input: input.size < 1000 or input.flat[0] == input.flat[0],
    refuse=lambda input: refuse(),
)
def noise(input, seed, output, saved, rows):
    size = input.shape[-1]
    for row in rows:
        for i in range(size):
            output.row(row)[i] = input.row(row)[i] + language.random(seed, row * size + i)


def refuse():
    raise ValueError("noise: input must begin with a number, got nan")


operator = torch.ops.foo_generators.noise


def generator_of(device):
    return torch.default_generator if device == "cpu" else torch.foo.default_generators[0]


def test_the_seed_is_what_torch_draws(device):
    """The seeds equal random_ of an int64 tensor, on cpu and on foo."""
    torch.manual_seed(3)
    expected = [int(torch.empty((), dtype=torch.int64).random_()) for _ in range(3)]
    torch.manual_seed(3)
    x = torch.zeros(2, 3, device=device)
    calls = [operator(x) for _ in range(3)]
    assert [int(seed) for _, seed in calls] == expected
    torch.manual_seed(3)
    for output, _ in calls:
        assert operator(x)[0].equal(output)


def test_a_generator_that_is_given_is_the_only_one_that_changes(device):
    generator = torch.Generator(device).manual_seed(5)
    states = [generator_of(each).get_state() for each in ("cpu", "foo")]
    first, second = (operator(torch.zeros(7, device=device), generator) for _ in range(2))
    assert not first[0].equal(second[0])
    for each, state in zip(("cpu", "foo"), states):
        assert generator_of(each).get_state().equal(state)
    torch.manual_seed(5)
    assert operator(torch.zeros(7, device=device))[0].equal(first[0])


def test_the_default_one_of_another_device_does_not_change(device):
    other = generator_of("foo" if device == "cpu" else "cpu")
    state, own = other.get_state(), generator_of(device).get_state()
    operator(torch.zeros(7, device=device))
    assert other.get_state().equal(state)
    assert not generator_of(device).get_state().equal(own)


def test_a_generator_of_another_device_is_refused(device):
    other = "foo" if device == "cpu" else "cpu"
    message = f"noise: generator must be on {device} as the tensors are, got {other}"
    with pytest.raises(ValueError, match=f"^{message}"):
        operator(torch.zeros(3, device=device), torch.Generator(other))


def test_a_call_that_is_refused_leaves_the_generator(device):
    state = generator_of(device).get_state()
    for wrong in (torch.tensor(1.0), torch.full((1000,), torch.nan)):
        with pytest.raises(ValueError, match="noise: input must"):
            operator(wrong.to(device))
    assert generator_of(device).get_state().equal(state)


def test_every_number_of_threads_draws_the_same():
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            results.append(operator(torch.zeros(1000, 300))[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_draw_the_same(backend, device):
    if backend == "inductor" and device == "foo":
        pytest.skip("Inductor generates code for cpu here")

    def twice(x):
        return operator(x)[0] - operator(x)[0]

    x = torch.zeros(4, 5, device=device)
    torch.manual_seed(7)
    expected = twice(x)
    torch.manual_seed(7)
    result = torch.compile(twice, backend=backend, fullgraph=True)(x)
    assert result.equal(expected)
    assert result.abs().min() > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_vmap(is_mapped, depth, device):
    def mapped(randomness):
        def call(x):
            return operator(x if is_mapped else torch.zeros(5, device=device))[0]

        for _ in range(depth):
            call = torch.vmap(call, randomness=randomness)
        torch.manual_seed(2)
        result = call(torch.zeros(*[3] * depth, 5, device=device))
        return result.flatten(0, -2)

    torch.manual_seed(2)
    expected = operator(torch.zeros(5, device=device))[0]
    assert mapped("same").equal(expected.expand(3**depth, 5))
    different = mapped("different")
    assert different[0].equal(expected)
    assert len(different.cpu().unique(dim=0)) == 3**depth
    with pytest.raises(
        RuntimeError, match="called random operation while in randomness error mode"
    ):
        mapped("error")


def test_meta_tensors():
    output, seed = operator(torch.zeros(3, 4, device="meta"))
    assert output.shape == (3, 4)
    assert seed.dtype == torch.int64


def test_the_tag_is_added():
    assert torch.Tag.nondeterministic_seeded in operator.default.tags


def test_wrong_operators():
    torch.library.define("foo_generators::untagged", SCHEMA)
    message = "foo_generators::untagged: an operator with a generator must have the tag"
    with pytest.raises(TypeError, match=message):
        library.register_kernel("foo_generators::untagged", "cpu", noise)
    library.define("foo_generators::elementwise", "(Tensor x, Generator? generator) -> Tensor")
    message = (
        "foo_generators::elementwise: an elementwise kernel must not take a generator, since it "
        "does not know its element, got generator; use a tile_kernel"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        library.register_kernel(
            "foo_generators::elementwise", "cpu", library.elementwise_kernel(lambda x, seed: x)
        )
    library.define("foo_generators::early", SCHEMA)
    kernel = library.tile_kernel(tiles=lambda seed: seed)(noise.function)
    message = r"tiles must take arguments that the kernel has \(input, output, saved\), got seed"
    with pytest.raises(TypeError, match=message):
        library.register_kernel("foo_generators::early", "cpu", kernel)
