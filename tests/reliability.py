"""Long runs on foo: ``make reliability``. Each ends with figures that must be exact.

Threads that allocate, compute and free for a minute; a million operators without growth of memory;
memory that runs out in backward passes, from which the process goes on.
"""

import argparse
import gc
import random
import resource
import threading
import time

import torch
import torch.nn.functional as F

THREADS = 8
OPERATORS = 1_000_000
BACKWARD_PASSES = 200
LARGEST = 1 << 20  # elements of a tensor
ALLOWED_GROWTH = 32 << 20  # bytes, of the whole process


def check_nothing_is_left() -> None:
    """Every figure of what is in use is zero, and the cache can be emptied."""
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


def allocate_and_compute(seed: int, until: float) -> int:
    """Tensors with a number of this thread in each element, which nobody else may change."""
    numbers = random.Random(seed)
    kept: list[tuple[torch.Tensor, int]] = []
    steps = 0
    while time.monotonic() < until:
        steps += 1
        device = f"foo:{numbers.randrange(torch.foo.device_count())}"
        size = numbers.randrange(1, 1 << numbers.randrange(1, LARGEST.bit_length()))
        value = seed * 1000 + numbers.randrange(1000)
        kept.append((torch.full((size,), value, device=device), value))
        if len(kept) > 20 or numbers.random() < 0.4:
            tensor, value = kept.pop(numbers.randrange(len(kept)))
            assert tensor.eq(value).all(), f"thread {seed}: another thread wrote here"
        if numbers.random() < 0.05:
            weight = torch.randn(16, 16, device=device, requires_grad=True)
            F.softmax(weight @ weight.T, -1).square().sum().backward()
            assert weight.grad is not None
            assert weight.grad.isfinite().all()
    assert all(tensor.eq(value).all() for tensor, value in kept)
    return steps


def run_threads(seconds: float) -> None:
    until = time.monotonic() + seconds
    steps: list[int] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            steps.append(allocate_and_compute(seed, until))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    check_nothing_is_left()
    print(f"{THREADS} threads, {seconds:.0f} s, {sum(steps)} steps: figures exact", flush=True)


def peak_of_process() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_operators(count: int) -> None:
    tensor = torch.ones(8, device="foo")
    other = torch.ones(8, device="foo")

    def run(times: int) -> None:
        for _ in range(times // 4):
            ((tensor + other).abs() * other).view(2, 4)

    run(10_000)
    reserved, allocated, peak = (
        torch.foo.memory_reserved(),
        torch.foo.memory_allocated(),
        peak_of_process(),
    )
    run(count)
    assert torch.foo.memory_reserved() == reserved
    assert torch.foo.memory_allocated() == allocated
    growth = peak_of_process() - peak
    assert growth < ALLOWED_GROWTH, f"the process grew by {growth} bytes"
    print(f"{count} operators: the process grew by {growth >> 10} KiB", flush=True)


def run_out_of_memory(passes: int) -> None:
    """Where the limit bites differs from pass to pass; what is left never does."""
    parameters = [torch.randn(64, 64, device="foo", requires_grad=True) for _ in range(8)]
    input = torch.randn(8192, 64, device="foo")
    held = torch.foo.memory_allocated()
    total = torch.foo.mem_get_info()[1]

    def step() -> None:
        value = input
        for parameter in parameters:
            value = torch.tanh(value @ parameter)
        value.sum().backward()
        for parameter in parameters:
            parameter.grad = None

    torch.foo.empty_cache()
    fixed = torch.foo.memory_reserved()
    torch.foo.reset_peak_memory_stats()
    step()
    needed = torch.foo.max_memory_reserved() - fixed
    raised = 0
    for each in range(passes):
        torch.foo.empty_cache()
        limit = fixed + needed * 2 * each // passes
        torch.foo.set_per_process_memory_fraction(limit / total)
        try:
            step()
        except torch.OutOfMemoryError:
            raised += 1
        torch.foo.set_per_process_memory_fraction(1.0)
        for parameter in parameters:
            parameter.grad = None
        gc.collect()
        assert torch.foo.memory_allocated() == held
        step()
    assert 0 < raised < passes, f"memory ran out in {raised} of {passes} passes"
    print(f"memory ran out in {raised} of {passes} passes, and the process went on", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of the threads")
    parser.add_argument("--operators", type=int, default=OPERATORS)
    parser.add_argument("--passes", type=int, default=BACKWARD_PASSES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run_threads(options.seconds)
    run_operators(options.operators)
    run_out_of_memory(options.passes)


if __name__ == "__main__":
    main()
