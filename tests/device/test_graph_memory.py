"""A graph keeps the memory that it writes, and frees it at the end."""

import gc

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def no_garbage(quick_collections):
    gc.collect()
    torch.foo.empty_cache()


def captured(function, **options):
    graph = torch.foo.FooGraph()
    with torch.foo.graph(graph, **options):
        results = function()
    return graph, results


def test_nobody_else_gets_memory_of_a_graph():
    x = torch.rand(1000, device="foo")
    graph, y = captured(lambda: (x + 1).sin() + 1)
    before = torch.foo.memory_allocated()
    others = [torch.zeros(1000, device="foo") for _ in range(50)]
    graph.replay()
    assert all(not other.any() for other in others)
    del others
    assert torch.foo.memory_allocated() == before
    assert torch.equal(y, (x + 1).sin() + 1)


def test_replays_allocate_nothing():
    x = torch.rand(1000, device="foo")
    graph, _ = captured(lambda: (x + 1).sin().sum())
    graph.replay()
    torch.foo.reset_accumulated_memory_stats()
    for _ in range(5):
        graph.replay()
    # Kernels make tensors of numbers while they run.
    assert torch.foo.memory_stats()["allocated_bytes.all.allocated"] <= 5 * 4 * 64


def test_memory_goes_back():
    before = torch.foo.memory_allocated()
    x = torch.rand(1000, device="foo")
    with_input = torch.foo.memory_allocated()
    graph, y = captured(lambda x=x: (x + 1).sin())
    assert torch.foo.memory_allocated() == with_input + 2 * 4032
    pool = graph.pool()
    assert torch.foo.memory_snapshot(pool)
    graph.reset()
    assert torch.foo.memory_allocated() == with_input + 4032
    y.fill_(3)  # an ordinary tensor now
    del y, graph, x
    torch.foo.empty_cache()
    assert torch.foo.memory_allocated() == before
    assert not torch.foo.memory_snapshot(pool)


def test_results_outlive_their_graph():
    x = torch.ones(1000, device="foo")
    graph, y = captured(lambda: x + 1)
    graph.replay()
    del graph
    gc.collect()
    others = [torch.zeros(1000, device="foo") for _ in range(10)]
    assert y.sum().item() == 2000
    del others


def test_graphs_share_a_pool():
    x = torch.rand(1000, device="foo")
    first, y = captured(lambda: x * 2)
    second, z = captured(lambda y=y: y + 1, pool=first.pool())
    assert second.pool() == first.pool()
    third, _ = captured(lambda: x * 2)
    assert third.pool() != first.pool()
    for _ in range(2):
        x.uniform_()
        first.replay()
        second.replay()
        assert torch.equal(z, x * 2 + 1)
    # The second graph keeps the tensors that it reads.
    del y
    first.reset()
    gc.collect()
    others = [torch.zeros(1000, device="foo") for _ in range(10)]
    second.replay()
    assert torch.equal(z, x * 2 + 1)
    del others


def model_and_input():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to("foo")
    return model, torch.randn(5, 8, device="foo", requires_grad=True)


def test_graphed_callables_train_like_the_others():
    (model, x), (graphed, y) = model_and_input(), model_and_input()
    graphed = torch.foo.make_graphed_callables(graphed, (torch.zeros_like(y, requires_grad=True),))
    for _ in range(3):
        for each, given in ((model, x), (graphed, y)):
            each.zero_grad()
            given.grad = None
            each(given).square().sum().backward()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= 0.01 * parameter.grad
        assert torch.equal(x.grad, y.grad)
        for parameter, other in zip(model.parameters(), graphed.parameters(), strict=True):
            assert torch.equal(parameter, other)
            assert torch.equal(parameter.grad, other.grad)
    graphed.eval()  # eval mode was not captured
    assert torch.equal(graphed(y[:2]), model(x[:2]))


def test_graphed_functions_run_in_their_order():
    def first(x):
        return {"sin": x.sin(), "both": (x, x * 2)}

    def second(x, y):
        return x * y

    sample = torch.zeros(4, device="foo", requires_grad=True)
    graphed_first, graphed_second = torch.foo.make_graphed_callables(
        (first, second), ((sample,), (sample.detach().clone().requires_grad_(), sample * 1))
    )
    x = torch.rand(4, device="foo", requires_grad=True)
    results = graphed_first(x)
    result = graphed_second(results["sin"], results["both"][1])
    assert torch.equal(result, x.sin() * (x * 2))
    [gradient] = torch.autograd.grad(result.sum(), x)
    exact = x.detach().cpu().double()
    torch.testing.assert_close(gradient.cpu().double(), 2 * exact.sin() + 2 * exact * exact.cos(),
                               rtol=1e-5, atol=1e-6)  # fmt: skip


def test_graphed_callables_refuse():
    make = torch.foo.make_graphed_callables
    x = torch.zeros(3, device="foo")
    with pytest.raises(TypeError) as error:
        make(lambda x, y: x, (x, 3))
    assert str(error.value) == "make_graphed_callables: sample_args must be tensors, got int"
    model = nn.Linear(3, 3, device="foo")
    model.register_forward_hook(print)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make(model, (x,))
    assert str(error.value) == (
        "make_graphed_callables: modules must have no hooks when they are passed; register hooks "
        "afterwards"
    )
    model = nn.Module()
    model.register_buffer("buffer", torch.ones(3, device="foo", requires_grad=True))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make(model, (x,))
    assert str(error.value) == (
        "make_graphed_callables: buffers of modules must not require gradients"
    )
    with pytest.raises(RuntimeError) as error, torch.autocast("foo", dtype=torch.bfloat16):
        make(lambda x: x, (x,))
    assert str(error.value) == (
        "make_graphed_callables: autocast must not cache converted tensors; pass "
        "cache_enabled=False to torch.autocast"
    )
