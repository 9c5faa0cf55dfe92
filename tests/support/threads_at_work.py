"""Eight threads that allocate, copy, draw, compile and compute on the CPU and on foo at once.

Each thread works with numbers of its own, so any interference by another thread shows. At the end
every figure must be exact: results bit by bit, the states of the random generators, and the memory
in use.
"""

import collections
import gc
import random
import threading
import time

import torch
import torch.nn.functional as F

import foo_ops
from foo_ops import library

THREADS = 8
LARGEST = 1 << 20  # elements of a tensor
DRAWN = 5  # numbers per draw from a default generator
# Operators with a generator argument and without. Each advances the generator by the same amount
# every time, so the order of draws does not affect the state.
DRAWS = {
    "rand": lambda device: torch.rand(DRAWN, device=device),
    "dropout": lambda device: F.dropout(torch.ones(DRAWN, device=device), 0.5),
}
DEVICES = ("cpu", "foo:0", "foo:1")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_nothing_is_left() -> None:
    """Check that every memory-in-use figure is zero and that the cache can be emptied."""
    gc.collect()
    for index in range(torch.foo.device_count()):
        stats = torch.foo.memory_stats(index)
        for name in ("allocation", "active", "allocated_bytes", "active_bytes", "requested_bytes"):
            for pool in ("all", "small_pool", "large_pool"):
                assert stats[f"{name}.{pool}.current"] == 0, f"foo:{index}: {name} of {pool}"
            allocated, freed = (stats[f"{name}.all.{what}"] for what in ("allocated", "freed"))
            assert allocated == freed > 0, f"foo:{index}: {name} {allocated} and {freed}"
    torch.foo.empty_cache()
    for index in range(torch.foo.device_count()):
        assert torch.foo.memory_reserved(index) == 0


def attend(device: torch.device | str) -> list[torch.Tensor]:
    """Compute attention and its gradients; each call must return the same bits."""
    numbers = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 33, 16, generator=numbers) for _ in range(3)]
    inputs = [tensor.to(device).requires_grad_() for tensor in inputs]
    output = foo_ops.attention(*inputs, is_causal=True)
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]


class Work:
    """One thread's work, step by step."""

    def __init__(self, seed: int, expected: list[torch.Tensor]) -> None:
        self._seed = seed
        self._numbers = random.Random(seed)
        self._expected = expected
        self._kept: list[tuple[torch.Tensor, int]] = []
        self._compiled = 0
        self.steps = 0
        # Draws from default generators, by device and name.
        self.draws: collections.Counter[tuple[str, str]] = collections.Counter()

    def run(self, until: float) -> None:
        steps = (self._allocate, self._copy, self._draw, self._draw_from_default, self._compute)
        while time.monotonic() < until:
            self.steps += 1
            self._numbers.choice(steps)()
            if self._numbers.random() < 0.02:
                self._compile()
        for tensor, value in self._kept:
            self._check(tensor, value)
        self._kept.clear()

    def _check(self, tensor: torch.Tensor, value: int) -> None:
        assert tensor.eq(value).all(), f"thread {self._seed}: another thread wrote here"

    def _allocate(self) -> None:
        """Make a tensor filled with a number of this thread."""
        size = self._numbers.randrange(1, 1 << self._numbers.randrange(1, LARGEST.bit_length()))
        value = self._seed * 1000 + self._numbers.randrange(1000)
        tensor = torch.full((size,), value, device=self._numbers.choice(DEVICES))
        self._kept.append((tensor, value))
        if len(self._kept) > 20 or self._numbers.random() < 0.4:
            self._check(*self._kept.pop(self._numbers.randrange(len(self._kept))))

    def _copy(self) -> None:
        if self._kept:
            place = self._numbers.randrange(len(self._kept))
            tensor, value = self._kept[place]
            pinned = tensor.cpu().pin_memory("foo")
            copied = pinned.to(self._numbers.choice(DEVICES), non_blocking=True)
            torch.foo.synchronize()
            self._kept[place] = copied, value

    def _draw(self) -> None:
        """Draw from this thread's generator, which has its own sequence."""
        seed, device = self._numbers.randrange(1000), self._numbers.choice(DEVICES)
        drawn = torch.randn(100, generator=torch.Generator(device).manual_seed(seed), device=device)
        expected = torch.randn(100, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(drawn.cpu(), expected), f"thread {self._seed}: other random numbers"

    def _draw_from_default(self) -> None:
        device, name = self._numbers.choice(DEVICES), self._numbers.choice(list(DRAWS))
        DRAWS[name](device)
        self.draws[device, name] += 1

    def _compute(self) -> None:
        for result, expected in zip(attend(self._numbers.choice(DEVICES)), self._expected):
            assert torch.equal(result.cpu(), expected), f"thread {self._seed}: another result"

    def _compile(self) -> None:
        """Compile a kernel that was never compiled before."""
        name = f"foo_threads::scale_{self._seed}_{self._compiled}"
        self._compiled += 1
        scale = self._seed + self._compiled / 7
        library.define(name, "(Tensor input) -> Tensor")
        kernel = library.elementwise_kernel(lambda x: x * scale)
        library.register_kernel(name, ("cpu", "foo"), kernel)
        dtype, device = self._numbers.choice(DTYPES), self._numbers.choice(DEVICES)
        input = torch.arange(10, dtype=dtype, device=device)
        operator = getattr(torch.ops.foo_threads, name.partition("::")[2])
        assert torch.allclose(operator(input).double(), input.double() * scale, rtol=0.01)


def state_of(device: str) -> torch.Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.foo.get_rng_state(device)


def check_draws(draws: collections.Counter[tuple[str, str]]) -> None:
    """Check that the default generators are in the state that one thread would leave."""
    states = {device: state_of(device) for device in DEVICES}
    torch.manual_seed(0)
    for (device, name), count in draws.items():
        for _ in range(count):
            DRAWS[name](device)
    for device, state in states.items():
        assert torch.equal(state, state_of(device)), f"{device}: a draw was lost or repeated"


def run_threads(seconds: float) -> int:
    """Return the number of steps that all threads took. Raises if a figure is not exact."""
    torch.manual_seed(0)
    expected = [tensor.detach() for tensor in attend("cpu")]
    until = time.monotonic() + seconds
    workers = [Work(seed, expected) for seed in range(THREADS)]
    errors: list[BaseException] = []

    def work(worker: Work) -> None:
        try:
            worker.run(until)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    check_draws(sum((worker.draws for worker in workers), collections.Counter()))
    check_nothing_is_left()
    return sum(worker.steps for worker in workers)
