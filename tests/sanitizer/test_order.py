"""The order of accesses: the cases of PyTorch's test of its CUDA sanitizer, on real streams."""

import pytest
import torch

from foo_ops import sanitizer


class Program:
    """Launches on numbered streams that read and write numbered tensors."""

    def __init__(self):
        self.streams = [torch.foo.Stream() for _ in range(12)]
        self.events = [torch.foo.Event() for _ in range(12)]
        self.tensors = [torch.zeros(4, device="foo") for _ in range(12)]
        torch.foo.synchronize()

    def launch(self, stream, read_only=(), read_write=()):
        with sanitizer.check() as findings, torch.foo.stream(self.streams[stream]):
            for index in read_only:
                torch.neg(self.tensors[index])
            for index in read_write:
                self.tensors[index].zero_()
        return [finding.kind for finding in findings]

    def good(self, *args, **options):
        assert self.launch(*args, **options) == []

    def bad(self, *args, **options):
        assert set(self.launch(*args, **options)) == {"race"}

    def record(self, event, stream):
        self.events[event].record(self.streams[stream])

    def wait(self, event, stream):
        self.streams[stream].wait_event(self.events[event])


@pytest.fixture
def program():
    with sanitizer.check():
        yield Program()


def test_nothing_is_launched(program):
    program.good(0)


def test_two_readers(program):
    program.good(1, read_only=[1])
    program.good(2, read_only=[1])


def test_simple_error(program):
    program.good(1, read_only=[1])
    program.bad(2, read_write=[1])


def test_simple_order(program):
    program.good(1, read_only=[1])
    program.record(0, 1)
    program.wait(0, 2)
    program.good(2, read_write=[1])


def test_reads_look_at_the_last_write(program):
    program.good(1, read_write=[1])
    program.record(0, 1)
    program.wait(0, 2)
    program.good(2, read_only=[1])
    program.bad(3, read_only=[1])


def test_branches(program):
    program.good(1, read_write=[1])
    program.record(0, 1)
    program.wait(0, 2)
    program.wait(0, 3)
    program.good(2, read_only=[1])
    program.good(3, read_only=[1])
    program.bad(2, read_write=[1])


def test_chain(program):
    program.good(0, read_only=[1])
    for i in range(10):
        program.record(i, i)
        program.wait(i, i + 1)
    program.good(10, read_write=[1])


def test_record_before_the_access(program):
    program.good(1, read_only=[1])
    program.record(0, 1)
    program.good(1, read_only=[1])
    program.wait(0, 2)
    program.bad(2, read_write=[1])


@pytest.mark.parametrize("is_recorded", [True, False])
def test_another_event(program, is_recorded):
    program.good(1, read_only=[1])
    if is_recorded:
        program.record(0, 1)
    program.events[0] = torch.foo.Event()
    program.wait(0, 2)
    program.bad(2, read_write=[1])


@pytest.mark.parametrize("missing", [0, 1])
def test_all_readers_count(program, missing):
    for i in range(1, 11):
        program.good(i, read_only=[1])
        program.record(i, i)
    for i in range(1, 11 - missing):
        program.wait(i, 0)
    (program.bad if missing else program.good)(0, read_write=[1])


def test_one_finding_for_each_tensor(program):
    tensors = program.tensors[:10]
    with torch.foo.stream(program.streams[0]), sanitizer.check():
        torch._foreach_zero_(tensors)
    with torch.foo.stream(program.streams[1]), sanitizer.check() as findings:
        torch._foreach_add_(tensors, 1.0)
    assert [finding.kind for finding in findings] == ["race"] * 10


def test_clocks_are_joined(program):
    program.good(1, read_write=[1])
    program.good(2, read_write=[2])
    program.record(1, 1)
    program.record(2, 2)
    program.good(1, read_write=[1])
    program.good(2, read_write=[2])
    program.wait(1, 2)
    program.wait(2, 1)
    program.record(3, 2)
    program.wait(3, 1)
    program.good(1, read_write=[1, 2])


def test_last_record_counts(program):
    program.good(1, read_only=[1])
    program.good(2, read_only=[2])
    program.record(1, 1)
    program.record(1, 2)
    program.wait(1, 3)
    program.bad(3, read_write=[1])


def test_several_wait_for_one_event(program):
    program.good(1, read_write=[1])
    program.record(1, 1)
    program.wait(1, 2)
    program.wait(1, 3)
    program.good(2, read_only=[1])
    program.good(3, read_only=[1])


@pytest.mark.parametrize("wait", [torch.foo.synchronize, torch.accelerator.synchronize])
def test_device_is_waited_for(program, wait):
    program.good(1, read_write=[1])
    wait()
    program.good(2, read_write=[1])


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[0].item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: bool(x[0] == 0),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.zeros(4).copy_(x),
        lambda x: x.copy_(torch.zeros(4)),
    ],
    ids=["item", "cpu", "nonzero", "bool", "mask", "tolist", "masked_select", "to", "from"],
)
def test_operators_that_wait(program, wait):
    program.good(1, read_write=[1])
    with torch.foo.stream(program.streams[1]):
        wait(program.tensors[1])
    program.good(2, read_write=[1])


@pytest.mark.parametrize(
    "no_wait",
    [
        lambda x: x.sum(),
        lambda x: x[torch.tensor([0, 1], device="foo")],
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.clone(),
        lambda x: x.repeat_interleave(torch.ones(4, dtype=int, device="foo"), output_size=4),
    ],
    ids=["sum", "index", "non_blocking", "clone", "repeat_interleave"],
)
def test_operators_that_do_not_wait(program, no_wait):
    program.good(1, read_write=[1])
    with torch.foo.stream(program.streams[1]):
        no_wait(program.tensors[1])
    program.bad(2, read_write=[1])


def test_copies_between_devices_come_in_order():
    with sanitizer.check() as findings:
        x = torch.ones(4, device="foo:0")
        y = x.to("foo:1")
        y.add_(1)
        x.copy_(y)
        x.add_(1)
    assert findings == []


def test_streams_without_end():
    with sanitizer.check() as findings:
        x = torch.ones(4, device="foo")
        for _ in range(300):
            stream = torch.foo.Stream()
            stream.wait_stream(torch.foo.current_stream())
            with torch.foo.stream(stream):
                x.add_(1)
            torch.foo.current_stream().wait_stream(stream)
            x.sum().item()
        x.add_(1)
        with torch.foo.stream(torch.foo.Stream()):
            x.add_(1)
    assert [finding.kind for finding in findings] == ["race"]
