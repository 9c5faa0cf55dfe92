"""Unsupported calls in a graph raise with the operator name; the device stays usable."""

import contextlib
import gc
import re

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

COPY = "aten::copy_: cannot be captured in a graph: a copy between cpu and foo needs pinned memory and non_blocking=True"  # noqa: E501
WAITS = "cannot be captured in a graph: the host would wait for the device"
STREAM = "cannot be captured in a graph: the host would wait for a stream that is being captured"
DENSE = (
    "cannot be captured in a graph: its tensors must be dense, got one that is quantized, sparse "
    "or nested"
)


def capture(graph, function):
    with torch.foo.graph(graph):
        function()


def x():
    return torch.arange(6.0, device="foo")


def captured_event():
    event = torch.foo.Event()
    event.record(torch.foo.current_stream())
    return event


REFUSED = {
    "item": (lambda x: x[0].item(), f"aten::item: {WAITS}"),
    "bool": (lambda x: bool(x[0]), f"aten::item: {WAITS}"),
    "nonzero": (lambda x: x.nonzero(), f"aten::nonzero: {WAITS}"),
    "mask": (lambda x: x[x > 1], f"aten::index: {WAITS}"),
    "unique": (lambda x: torch.unique(x), f"aten::_unique2: {WAITS}"),
    "equal": (lambda x: torch.equal(x, x), f"aten::equal: {WAITS}"),
    "cpu": (lambda x: x.cpu(), COPY),
    "to_device": (lambda x: torch.ones(3).to("foo"), COPY),
    "tensor": (lambda x: torch.tensor(3.0, device="foo"), COPY),
    "blocking": (lambda x: x.copy_(torch.ones(6).pin_memory()), COPY),
    "pageable": (lambda x: x.copy_(torch.ones(6), non_blocking=True), COPY),
    "indices_of_the_cpu": (
        lambda x: x[torch.tensor([1, 2])],
        "aten::index: cannot be captured in a graph: a tensor on the cpu would be copied to the "
        "device",
    ),
    "sparse": (lambda x: x.to_sparse(), f"aten::_to_sparse: {DENSE}"),
    "synchronize": (lambda x: torch.foo.synchronize(), f"synchronize: {STREAM}"),
    "stream": (lambda x: torch.foo.current_stream().synchronize(), f"Stream.synchronize: {STREAM}"),
    "query": (lambda x: torch.foo.current_stream().query(), f"Stream.synchronize: {STREAM}"),
    "event": (lambda x: captured_event().synchronize(), f"Event.synchronize: {STREAM}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, message = REFUSED[name]
    tensor = x()
    graph = torch.foo.FooGraph()
    with pytest.raises(RuntimeError) as error:
        capture(graph, lambda: function(tensor.add_(1)))
    assert str(error.value).splitlines()[0] == message
    # The capture has ended, changed nothing, and cannot be replayed.
    assert not torch.foo.is_current_stream_capturing()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="replay: nothing has been captured"):
        graph.replay()
    with torch.foo.graph(graph):
        y = tensor + 1
    graph.replay()
    assert y.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_refusal_that_is_caught_ends_in_an_error():
    graph, tensor = torch.foo.FooGraph(), x()

    def function():
        with contextlib.suppress(RuntimeError):
            tensor.nonzero()
        tensor.add_(1)

    with pytest.raises(RuntimeError) as error:
        capture(graph, function)
    assert str(error.value).splitlines()[0] == (
        f"graph: the capture has failed: aten::nonzero: {WAITS}"
    )
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_sparse_and_nested_tensors_from_before():
    sparse = torch.eye(3, device="foo").to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="foo")
    for tensor in (sparse, nested):
        with pytest.raises(RuntimeError, match=re.escape(DENSE)):
            capture(torch.foo.FooGraph(), tensor.neg)


def test_other_errors_leave_a_graph_without_the_operator():
    graph, tensor = torch.foo.FooGraph(), x()
    with torch.foo.graph(graph):
        with pytest.raises(RuntimeError, match="size of tensor"):
            tensor + torch.ones(4, device="foo")
        y = tensor * 2
    graph.replay()
    assert y.tolist() == [0, 2, 4, 6, 8, 10]


def message_of(function, *arguments):
    with pytest.raises(RuntimeError) as error:
        function(*arguments)
    return str(error.value).splitlines()[0]


def test_wrong_order_of_calls():
    graph = torch.foo.FooGraph()
    assert message_of(graph.capture_end) == "capture_end: no capture is under way"
    assert message_of(graph.replay) == "replay: nothing has been captured"
    assert message_of(graph.instantiate) == "instantiate: nothing has been captured"
    assert message_of(graph.pool) == "pool: nothing has been captured"
    assert message_of(graph.capture_begin) == (
        "capture_begin: the current stream must not be the default one: capture on another stream, "
        "and replay on any"
    )
    other = torch.foo.FooGraph()
    with torch.foo.graph(graph):
        tensor = torch.ones(3, device="foo")
        assert message_of(other.capture_begin) == (
            "capture_begin: another graph is capturing the current stream"
        )
        assert message_of(graph.reset) == "reset: a capture is under way"
        with torch.foo.stream(torch.foo.Stream()):
            assert message_of(graph.capture_end) == (
                "capture_end: the current stream must be that of capture_begin"
            )
            assert message_of(other.replay) == "replay: nothing has been captured"
    with torch.foo.stream(torch.foo.Stream()):
        assert message_of(graph.capture_begin) == (
            "capture_begin: this graph has been captured already: call reset(), or use another "
            "graph"
        )
        other.capture_begin()
        assert message_of(graph.replay) == "replay: a graph is being captured"
        other.capture_end()
    graph.replay()
    assert tensor.tolist() == [1, 1, 1]
    graph.reset()
    assert message_of(graph.replay) == "replay: nothing has been captured"
    with torch.foo.graph(graph):
        tensor = torch.full((3,), 2.0, device="foo")
    graph.replay()
    assert tensor.tolist() == [2, 2, 2]


def test_an_input_that_is_gone():
    tensor, other = x(), x()
    graph = torch.foo.FooGraph()
    with torch.foo.graph(graph):
        y = tensor * 2 + other
    graph.replay()
    del tensor
    gc.collect()
    assert message_of(graph.replay) == (
        "replay: memory that aten::mul uses has been freed or moved since the capture: keep the "
        "tensors that a graph reads and writes, and change them in place"
    )
    assert y.tolist() == [0, 3, 6, 9, 12, 15]


@pytest.mark.parametrize("moves", ["to_other_memory", "within_its_storage"])
def test_an_input_that_has_moved(moves):
    model = nn.Linear(6, 2, device="foo")
    tensor = x()
    graph = torch.foo.FooGraph()
    capture(graph, lambda: model(tensor))
    if moves == "to_other_memory":
        tensor.data = torch.ones(6, device="foo")
    else:
        tensor.resize_(100_000)
    assert "memory that aten::addmm uses has been freed or moved" in message_of(graph.replay)


def test_a_graph_that_goes_while_it_captures():
    tensor = x()
    torch.foo.synchronize()
    with torch.foo.stream(torch.foo.Stream()):
        graph = torch.foo.FooGraph()
        graph.capture_begin()
        tensor.add_(1)
        del graph
        assert not torch.foo.is_current_stream_capturing()
        assert tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_optimizers_are_watched_only_while_a_graph_captures():
    """A permanent hook would be traced by torch.compile, and run in every step on the CPU."""
    hooks = _global_optimizer_pre_hooks
    before = len(hooks)
    counts = []
    tensor = x()
    for _ in range(2):
        capture(torch.foo.FooGraph(), lambda: counts.append(len(hooks)) or tensor.add_(1))
        assert len(hooks) == before
    assert counts == [before + 1] * 2
