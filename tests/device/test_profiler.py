"""torch's profilers see the time of operators on foo, and memory by device."""

import time

import torch
from torch.profiler import ProfilerActivity, profile


def test_time_on_the_device():
    """A large product takes more microseconds than none, and fewer than passed on the clock."""
    matrix = torch.rand(300, 300, device="foo")
    start = time.perf_counter()
    with torch.autograd.profiler.profile(use_device="foo") as profiler:
        (matrix @ matrix).sum()
    passed = 1e6 * (time.perf_counter() - start)
    times = {event.key: event.device_time_total for event in profiler.key_averages()}
    assert 0 < times["aten::mm"] <= times["aten::matmul"] < passed
    assert "Self FOO" in profiler.key_averages().table()


def test_memory_on_the_device():
    activities = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
    with profile(activities=activities, profile_memory=True) as profiler:
        kept = torch.ones(1000, device="foo")
        torch.foo.synchronize()
    event = next(each for each in profiler.events() if each.name == "aten::ones")
    assert event.device_memory_usage == 4032
    assert event.cpu_memory_usage == 0
    assert kept.sum().item() == 1000
