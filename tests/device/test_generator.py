"""Device foo draws the CPU's random numbers for the same seed."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from support.random_numbers import drawn_on_both

RANDOM = {
    "rand": lambda device: torch.rand(50, device=device),
    "randn": lambda device: torch.randn(50, device=device),
    "randn_small": lambda device: torch.randn(3, dtype=torch.float64, device=device),
    "randint": lambda device: torch.randint(9, (50,), device=device),
    "randperm": lambda device: torch.randperm(50, device=device),
    "rand_like": lambda device: torch.rand_like(torch.ones(50, device=device)),
    "bernoulli": lambda device: torch.bernoulli(torch.full((50,), 0.5, device=device)),
    "bernoulli_": lambda device: torch.ones(50, device=device).bernoulli_(0.3),
    "multinomial": lambda device: torch.multinomial(torch.ones(50, device=device), 5),
    "normal": lambda device: torch.normal(torch.ones(50, device=device), 2.0),
    "poisson": lambda device: torch.poisson(torch.full((50,), 4.0, device=device)),
    "exponential_": lambda device: torch.empty(50, device=device).exponential_(),
    "dropout_mask": lambda device: torch.native_dropout(torch.ones(50, device=device), 0.3, True)[
        1
    ],
    "dropout": lambda device: F.dropout(torch.ones(50, device=device), 0.5),
    "rrelu": lambda device: F.rrelu(-torch.ones(50, device=device), training=True),
    "gumbel_softmax": lambda device: F.gumbel_softmax(torch.ones(50, device=device)),
    "xavier_uniform_": lambda device: torch.nn.init.xavier_uniform_(
        torch.empty(7, 7, device=device)
    ),
}


@pytest.fixture(autouse=True)
def unchanged_state():
    states, cpu = torch.foo.get_rng_state_all(), torch.get_rng_state()
    yield
    torch.foo.set_rng_state_all(states)
    torch.set_rng_state(cpu)


@pytest.mark.parametrize("name", RANDOM)
def test_same_numbers_as_cpu(name):
    expected, actual = drawn_on_both(RANDOM[name])
    assert torch.equal(actual[0].cpu(), expected[0])
    assert torch.equal(actual[1].cpu(), expected[1])


def test_devices_have_generators_of_their_own():
    torch.manual_seed(7)
    torch.rand(10, device="foo:0")
    assert torch.equal(
        torch.rand(5, device="foo:1").cpu(), torch.rand(5, generator=torch.manual_seed(7))
    )


def test_seeds():
    torch.foo.manual_seed_all(11)
    assert [generator.initial_seed() for generator in torch.foo.default_generators] == [11, 11]
    with torch.foo.device(1):
        torch.foo.manual_seed(12)
        assert torch.foo.initial_seed() == 12
    assert torch.foo.initial_seed() == 11
    torch.foo.seed()
    assert torch.foo.initial_seed() != 11
    torch.foo.seed_all()
    assert len({generator.initial_seed() for generator in torch.foo.default_generators}) == 1
    torch.manual_seed(13)
    assert torch.foo.initial_seed() == 13


def test_state():
    state = torch.foo.get_rng_state("foo:1")
    first = torch.rand(5, device="foo:1")
    torch.foo.set_rng_state(state, 1)
    assert torch.equal(torch.rand(5, device="foo:1"), first)
    assert state.device.type == "cpu"
    assert state.dtype == torch.uint8


def test_generator_of_one_s_own():
    generator = torch.Generator("foo:1")
    assert generator.device == torch.device("foo:1")
    generator.manual_seed(3)
    before = torch.foo.get_rng_state(1)
    numbers = torch.randn(20, device="foo:1", generator=generator)
    assert torch.equal(numbers.cpu(), torch.randn(20, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(torch.foo.get_rng_state(1), before)
    assert torch.Generator("foo").device == torch.device("foo:0")


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g)), lambda g: g.clone_state()]
)
def test_copies_of_a_generator(duplicate):
    generator = torch.Generator("foo:1").manual_seed(3)
    torch.rand(3, device="foo:1", generator=generator)
    twin = duplicate(generator)
    assert twin.device == generator.device
    assert twin.initial_seed() == 3
    assert torch.equal(
        torch.rand(3, device="foo:1", generator=generator),
        torch.rand(3, device="foo:1", generator=twin),
    )


def test_generators_of_other_devices_are_refused():
    message = "Expected a 'foo' device type for generator but found 'cpu'"
    with pytest.raises(RuntimeError, match=message):
        torch.randn(3, device="foo", generator=torch.Generator())
    message = "Expected a 'cpu' device type for generator but found 'foo'"
    with pytest.raises(RuntimeError, match=message):
        torch.randn(3, generator=torch.Generator("foo"))


def test_there_is_no_offset():
    generator = torch.Generator("foo")
    assert generator.get_offset() == 0
    with pytest.raises(
        ValueError, match="foo: offset must be 0, since the generator has none, got 4"
    ):
        generator.set_offset(4)


def test_generators_can_share_a_state():
    generator = torch.Generator("foo").manual_seed(3)
    shared = generator.graphsafe_get_state()
    expected = torch.rand(6, generator=torch.Generator().manual_seed(3))
    drawn = [torch.rand(3, device="foo", generator=each).cpu() for each in (generator, shared)]
    assert torch.equal(torch.cat(drawn), expected)
    other = torch.Generator("foo").manual_seed(5)
    assert other.graphsafe_set_state(shared) is other
    assert other.initial_seed() == 3
    other.manual_seed(3)
    drawn = [torch.rand(3, device="foo", generator=each).cpu() for each in (other, generator)]
    assert torch.equal(torch.cat(drawn), expected)
    with pytest.raises(ValueError, match="foo: state must be a generator of foo, got one of cpu"):
        generator.graphsafe_set_state(torch.Generator())


def test_fork_rng():
    states = torch.foo.get_rng_state_all()
    with torch.random.fork_rng(devices=[0, 1], device_type="foo"):
        torch.rand(3, device="foo")
        torch.rand(3, device="foo:1")
        assert not torch.equal(torch.foo.get_rng_state(), states[0])
    assert all(map(torch.equal, torch.foo.get_rng_state_all(), states))


def test_threads_draw_different_numbers():
    torch.manual_seed(1)
    drawn = []

    def draw():
        drawn.extend(torch.rand(100, device="foo").tolist())

    threads = [threading.Thread(target=draw) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = torch.rand(800, generator=torch.Generator().manual_seed(1))
    assert sorted(drawn) == sorted(expected.tolist())
