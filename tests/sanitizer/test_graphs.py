"""A capture reads and writes nothing; a replay does, in its own stream."""

import torch

from foo_ops import sanitizer


def captured(function):
    graph = torch.foo.FooGraph()
    with torch.foo.graph(graph):
        results = function()
    return graph, results


def kinds(findings):
    return [(finding.kind, finding.operator) for finding in findings]


def test_results_mean_nothing_before_the_first_replay():
    x = torch.ones(4, device="foo")
    for replays, expected in ((0, [("uninitialized read", "aten::neg")]), (1, [])):
        with sanitizer.check() as findings:
            graph, y = captured(lambda: (x + 1).exp())
            for _ in range(replays):
                graph.replay()
            y.neg()
        assert kinds(findings) == expected


def test_a_replay_writes_where_another_stream_reads():
    x = torch.ones(4, device="foo")
    for waits, expected in ((False, [("race", "aten::mul")]), (True, [])):
        with sanitizer.check() as findings:
            graph, y = captured(lambda: x * 2)
            graph.replay()
            reader = torch.foo.Stream()
            reader.wait_stream(torch.foo.current_stream())
            with torch.foo.stream(reader):
                y + 1
            if waits:
                torch.foo.current_stream().wait_stream(reader)
            graph.replay()
        assert kinds(findings) == expected


def test_a_replay_reads_what_another_stream_writes():
    x = torch.ones(4, device="foo")
    for waits, expected in ((False, [("race", "aten::mul")]), (True, [])):
        with sanitizer.check() as findings:
            graph, _ = captured(lambda: x * 2)
            writer = torch.foo.Stream()
            writer.wait_stream(torch.foo.current_stream())
            with torch.foo.stream(writer):
                x.fill_(3)
            if waits:
                torch.foo.current_stream().wait_stream(writer)
            graph.replay()
        assert kinds(findings) == expected


def test_a_capture_has_no_races():
    """The program is correct: the capture runs nothing, and the replay uses one stream."""
    x, out = torch.ones(4, device="foo"), torch.zeros(4, device="foo")
    with sanitizer.check() as findings:
        busy = torch.foo.Stream()
        busy.wait_stream(torch.foo.current_stream())
        graph = torch.foo.FooGraph()
        with torch.foo.graph(graph):
            with torch.foo.stream(busy):
                x.fill_(2)
            out.copy_(x + 1)
        torch.foo.current_stream().wait_stream(busy)
        graph.replay()
        assert out.tolist() == [3, 3, 3, 3]
    assert findings == []
