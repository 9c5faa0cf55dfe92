"""torch's profilers show the time of operators on foo, and memory by device."""

import json
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile


def test_time_on_the_device():
    """A large product takes a positive time, which is at most that of the clock."""
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
    """Return a function's result, and the profiler that recorded it."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as profiler:
        result = function()
    return result, profiler


def times_of(profiler):
    averages = profiler.key_averages()
    return {it.key: it.device_time_total for it in averages if it.device_time_total > 0}


def test_kernels_have_times():
    """A large product takes a positive time, which is at most that of the clock."""
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


@pytest.mark.parametrize("name", ["self_foo_time_total", "foo_time_total", "foo_time"])
def test_tables_are_sorted_by_foos_names(name):
    """The sort keys are the column names, with the meaning that CUDA's have."""
    large = torch.rand(300, 300, device="foo")
    _, profiler = profiled(lambda: (large[0].exp(), large @ large))
    averages = profiler.key_averages()
    as_cuda = averages.table(sort_by=name.replace("foo", "cuda"))
    assert averages.table(sort_by=name) == as_cuda != averages.table(sort_by="cpu_time_total")
    assert all(
        getattr(event, name) == getattr(event, name.replace("foo", "device"))
        and getattr(event, f"{name}_str") == getattr(event, f"{name.replace('foo', 'device')}_str")
        for event in [*averages, *profiler.events()]
    )


def test_memory_by_foos_name():
    activities = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
    with profile(activities=activities, profile_memory=True) as profiler:
        torch.ones(1000, device="foo")
    averages = profiler.key_averages()
    event = next(each for each in averages if each.key == "aten::ones")
    assert event.foo_memory_usage == 4032
    assert averages.table(sort_by="self_foo_memory_usage").count("aten::ones") == 1


def test_stacks_by_foos_time(tmp_path):
    activities = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
    x = torch.rand(300, 300, device="foo")
    experimental = torch._C._profiler._ExperimentalConfig(verbose=True)
    with profile(activities=activities, with_stack=True, experimental_config=experimental) as run:
        x @ x
    files = [tmp_path / name for name in ("foo", "privateuse1")]
    for path in files:
        run.export_stacks(str(path), f"self_{path.name}_time_total")
    assert files[0].read_text() == files[1].read_text()
    with pytest.raises(ValueError, match="self_foo_time_total"):
        run.export_stacks(str(files[0]), "foo_time")
