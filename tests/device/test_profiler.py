"""torch's profilers see the time of operators on foo, and memory by device."""

import json
import time

import pytest
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


def profiled(function):
    """Return what a function returns, and the profiler that saw it."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as profiler:
        result = function()
    return result, profiler


def times_of(profiler):
    averages = profiler.key_averages()
    return {it.key: it.device_time_total for it in averages if it.device_time_total > 0}


def test_kernels_have_times():
    """A large product takes more microseconds than none, and fewer than passed on the clock."""
    matrix = torch.rand(300, 300, device="foo")
    start = time.perf_counter()
    _, profiler = profiled(lambda: (matrix @ matrix).view(-1).relu())
    passed = 1e6 * (time.perf_counter() - start)
    times = times_of(profiler)
    kernel = times["kernel of aten::mm"]
    assert 0 < kernel < passed
    assert times["aten::mm"] == times["aten::matmul"] == pytest.approx(kernel)
    assert set(times) == {
        "kernel of aten::mm",
        "aten::mm",
        "aten::matmul",
        "kernel of aten::relu",
        "aten::relu",
    }
    assert "Self FOO time total" in profiler.key_averages().table()


def test_kernels_of_a_backward_pass():
    weight = torch.rand(50, 50, device="foo", requires_grad=True)
    _, profiler = profiled(lambda: weight.exp().sum().backward())
    assert times_of(profiler)["kernel of aten::mul"] > 0


def test_kernels_in_the_trace(tmp_path):
    stream = torch.foo.Stream("foo:1")
    x = torch.rand(100, device="foo:1")
    torch.foo.synchronize(1)

    def function():
        with torch.foo.stream(stream):
            x.exp()
        torch.ones(2) + 1

    _, profiler = profiled(function)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    [kernel] = [event for event in events if event.get("cat") == "kernel"]
    [operator] = [event for event in events if event["name"] == "aten::exp"]
    assert kernel["name"] == "kernel of aten::exp"
    assert (kernel["pid"], kernel["tid"]) == (1, stream.stream_id)
    assert operator["ts"] <= kernel["ts"] + 1
    assert kernel["ts"] + kernel["dur"] <= operator["ts"] + operator["dur"] + 1


def test_nothing_is_left_of_a_profiler():
    x = torch.rand(10, device="foo")
    profiled(lambda: x.exp())
    x.sin()
    _, profiler = profiled(lambda: x.cos())
    kernels = [event.name for event in profiler.events() if event.name.startswith("kernel of")]
    assert kernels == ["kernel of aten::cos"]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        x.cos()
    assert not [event for event in profiler.events() if event.name.startswith("kernel of")]


def test_replays_of_graphs():
    x = torch.rand(10, device="foo")
    graph = torch.foo.FooGraph()
    with torch.foo.graph(graph):
        x.exp().sin()
    _, profiler = profiled(graph.replay)
    kernels = [event.name for event in profiler.events() if event.name.startswith("kernel of")]
    assert kernels == ["kernel of aten::exp", "kernel of aten::sin"]
