"""Run foo for long: ``make reliability``. Each run ends with figures that must be exact.

Threads that allocate, copy, draw, compile and compute for a minute; a million operators without
memory growth; backward passes that run out of memory, after which the process goes on; a hundred
thousand steps of random sequences, compared with the CPU.
"""

import argparse
import gc
import resource

import torch
from hypothesis import stateful
from support import device_machine, threads_at_work

OPERATORS = 1_000_000
BACKWARD_PASSES = 200
STEPS = 100_000
ALLOWED_GROWTH = 32 << 20  # bytes, of the whole process


def run_threads(seconds: float) -> None:
    steps = threads_at_work.run_threads(seconds)
    print(
        f"{threads_at_work.THREADS} threads, {seconds:.0f} s, {steps} steps: figures exact",
        flush=True,
    )


def run_sequences(steps: int) -> None:
    torch.foo.set_matmul_kernels("cpu")
    machine = device_machine.DeviceMachine
    # Each sequence begins and ends with a collection, which need not visit imported modules: with
    # their objects a step took 65 ms, nearly all of it in the collector.
    gc.collect()
    gc.freeze()
    while machine.steps < steps:
        settings = device_machine.settings(examples=100, steps=50)
        stateful.run_state_machine_as_test(machine, settings=settings)
    print(f"{machine.steps} steps of random sequences: foo does what the CPU does", flush=True)


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
    """Run out of memory at a different place in each pass; the memory left is always the same."""
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
    parser.add_argument("--steps", type=int, default=STEPS, help="of random sequences")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run_threads(options.seconds)
    run_operators(options.operators)
    run_out_of_memory(options.passes)
    run_sequences(options.steps)


if __name__ == "__main__":
    main()
