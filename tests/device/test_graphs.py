"""Graphs replay a stream's operators with the same memory and new values."""

import pytest
import torch
from support.exact import assert_near
from torch import nn

N = 33


def capture(function, *arguments, **options):
    graph = torch.foo.FooGraph()
    with torch.foo.graph(graph, **options):
        results = function(*arguments)
    return graph, results


def numbers(*shape):
    return torch.randn(*shape, device="foo")


def test_replay_reads_what_is_there_now():
    x, weight = numbers(5, N), numbers(N, 7)
    graph, result = capture(lambda: (torch.nn.functional.gelu(x @ weight) + 1).softmax(-1))
    address = result.data_ptr()
    for _ in range(3):
        x.normal_()
        weight.uniform_(-1, 1)
        graph.replay()
        exact = torch.nn.functional.gelu(x.cpu().double() @ weight.cpu().double()) + 1
        assert_near(result, exact.softmax(-1), roundings=64)
        assert result.data_ptr() == address


@pytest.mark.parametrize("kind", ["torch.foo", "torch.accelerator"])
def test_both_faces(kind):
    x = torch.ones(3, device="foo")
    if kind == "torch.foo":
        graph, y = capture(lambda: x * 3)
    else:
        graph = torch.accelerator.Graph()
        with torch.Stream(), graph:
            y = x * 3
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [15, 15, 15]


def test_a_capture_changes_nothing():
    x, pinned = numbers(N), torch.zeros(N).pin_memory()
    before, state = x.clone(), torch.foo.get_rng_state()
    other = torch.Generator("foo").manual_seed(3)
    other_state = other.get_state()

    def change():
        x.mul_(2).add_(1)
        torch.relu_(x[:5])
        x.normal_(generator=other)
        pinned.copy_(x, non_blocking=True)
        return torch.rand(N, device="foo")

    graph, _ = capture(change)
    assert torch.equal(x, before)
    assert torch.equal(torch.foo.get_rng_state(), state)
    assert torch.equal(other.get_state(), other_state)
    assert pinned.tolist() == [0] * N
    graph.replay()
    assert torch.equal(pinned, x.cpu())
    assert not torch.equal(x, before)


def test_random_numbers_go_on_at_every_replay():
    x = torch.ones(N, device="foo")

    def draw():
        return nn.functional.dropout(x, 0.4), torch.randn(N, device="foo")

    graph, captured = capture(draw)
    torch.manual_seed(7)
    expected = [draw() for _ in range(3)]
    torch.manual_seed(7)
    for each in expected:
        graph.replay()
        for actual, wanted in zip(captured, each, strict=True):
            assert torch.equal(actual, wanted)
    assert not torch.equal(expected[0][1], expected[1][1])


def test_random_numbers_of_a_generator_of_ones_own():
    generator = torch.Generator("foo").manual_seed(1)
    graph = torch.foo.FooGraph()
    graph.register_generator_state(generator)
    with torch.foo.graph(graph):
        drawn = torch.rand(N, device="foo", generator=generator)
    again = torch.Generator("foo").manual_seed(1)
    for _ in range(2):
        graph.replay()
        assert torch.equal(drawn, torch.rand(N, device="foo", generator=again))


def training(capturable, device="foo", dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)
    model = nn.Sequential(*layers).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=capturable)

    def step(x, targets):
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), targets)
        loss.backward()
        optimizer.step()
        return loss

    return model, step


def test_a_whole_training_step():
    batches = [(torch.randn(5, 8), torch.randint(0, 4, (5,))) for _ in range(8)]
    exact_model, exact_step = training(False, "cpu", torch.float64)
    exact = [exact_step(x.double(), targets).item() for x, targets in batches]
    eager_model, eager_step = training(True)
    eager = [eager_step(x.to("foo"), targets.to("foo")).item() for x, targets in batches]
    model, step = training(True)
    x, targets = batches[0][0].to("foo"), batches[0][1].to("foo")
    losses = []
    stream = torch.foo.Stream()
    with torch.foo.stream(stream):
        for batch in batches[:3]:
            x.copy_(batch[0])
            targets.copy_(batch[1])
            losses.append(step(x, targets).item())
    graph, loss = capture(step, x, targets, stream=stream)
    for batch in batches[3:]:
        x.copy_(batch[0])
        targets.copy_(batch[1])
        graph.replay()
        losses.append(loss.item())
    assert losses == eager
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(exact), rtol=1e-4, atol=1e-5,
                               check_dtype=False)  # fmt: skip
    for parameter, of_eager in zip(model.parameters(), eager_model.parameters(), strict=True):
        assert torch.equal(parameter, of_eager)
        assert torch.equal(parameter.grad, of_eager.grad)
    for parameter, of_exact in zip(model.parameters(), exact_model.parameters(), strict=True):
        torch.testing.assert_close(parameter.cpu().double(), of_exact, rtol=1e-3, atol=1e-4)


def test_optimizers_that_are_not_capturable_are_refused():
    model, step = training(False)
    x, targets = numbers(5, 8), torch.zeros(5, dtype=torch.long, device="foo")
    step(x, targets)
    with pytest.raises(RuntimeError) as error:
        capture(step, x, targets)
    assert str(error.value) == (
        "Attempting graph capture of step() for an instance of AdamW but param_groups' "
        "capturable is False."
    )
    assert next(model.parameters()).isfinite().all()


def test_outputs_that_grow_and_views():
    x = numbers(4, 6)

    def function():
        out = torch.empty(0, device="foo")
        torch.add(x, 1, out=out)
        turned = out.t_()
        turned[1:].mul_(2)
        grown = torch.empty(2, device="foo")
        grown.resize_(3, 2).copy_(turned.reshape(-1)[:6].view(3, 2))
        return out, grown, torch._foreach_add([turned, grown], 1.5)

    graph, results = capture(function)
    for _ in range(2):
        x.normal_()
        graph.replay()
        out, grown, (first, second) = function()
        for actual, expected in zip(
            (results[0], results[1], *results[2]), (out, grown, first, second), strict=True
        ):
            assert torch.equal(actual, expected)


def test_what_a_tensor_held_before_it_grew():
    x = numbers(2)

    def function():
        grown = x * 1
        grown.resize_(4)
        grown[2:].zero_()
        return grown

    graph, result = capture(function)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(result, torch.cat([x, torch.zeros_like(x)]))


def test_copies_that_wait_for_a_write():
    x = numbers(N)
    shared = torch._lazy_clone(x)  # made before the capture

    def function():
        copy = torch._lazy_clone(x)
        return copy.add_(1), shared * 2

    graph, (copied, doubled) = capture(function)
    for _ in range(2):
        x.normal_()
        shared.uniform_()
        graph.replay()
        assert torch.equal(copied, x + 1)
        assert torch.equal(doubled, shared * 2)


def test_scalars_of_the_cpu_are_arguments():
    x, scale = numbers(N), torch.tensor(2.0)
    graph, result = capture(lambda: x * scale)
    scale.fill_(100)
    graph.replay()
    assert torch.equal(result, x * 2)


def test_copies_of_pinned_memory():
    source, there = torch.zeros(N).pin_memory(), torch.zeros(N).pin_memory()
    x = torch.empty(N, device="foo")

    def function():
        x.copy_(source, non_blocking=True)
        there.copy_(x * 2, non_blocking=True)

    graph, _ = capture(function)
    source.uniform_()
    graph.replay()
    torch.foo.synchronize()
    assert torch.equal(there, source * 2)


def test_side_streams_join_the_capture():
    x = numbers(N)
    side = torch.foo.Stream()

    def function():
        side.wait_stream(torch.foo.current_stream())
        with torch.foo.stream(side):
            assert torch.foo.is_current_stream_capturing()
            y = x * 2
        torch.foo.current_stream().wait_stream(side)
        return y + 1

    graph, result = capture(function)
    x.normal_()
    graph.replay()
    assert torch.equal(result, x * 2 + 1)
    # The stream no longer captures.
    with torch.foo.stream(side):
        assert not torch.foo.is_current_stream_capturing()
        assert (x - x).sum().item() == 0


def test_other_streams_are_not_captured():
    x, other = torch.ones(3, device="foo"), torch.foo.Stream()
    graph = torch.foo.FooGraph()
    with torch.foo.graph(graph):
        y = x + 1
        with torch.foo.stream(other):
            x.add_(1)
            assert x.sum().item() == 6
    assert x.tolist() == [2, 2, 2]
    graph.replay()
    assert x.tolist() == [2, 2, 2]
    assert y.tolist() == [3, 3, 3]


def test_backward_passes_of_other_threads_are_captured():
    weight = nn.Parameter(numbers(N))
    graph, loss = capture(lambda: (weight * weight).sum().backward())
    assert loss is None
    with torch.no_grad():
        weight.normal_()
    graph.replay()
    assert torch.equal(weight.grad, 2 * weight)


@pytest.mark.needs_compiler
def test_compiled_functions():
    @torch.compile
    def function(x, weight):
        return nn.functional.gelu(x @ weight + 1).sum(-1) * 2

    x, weight = numbers(4, N), numbers(N, 8)
    function(x, weight)
    graph, result = capture(function, x, weight)
    x.normal_()
    graph.replay()
    exact = nn.functional.gelu(x.cpu().double() @ weight.cpu().double() + 1).sum(-1) * 2
    assert_near(result, exact, roundings=64)


@pytest.mark.needs_compiler
def test_a_compiled_function_that_asks_for_graphs():
    function = torch.compile(lambda x: torch.sin(x) * 2, mode="reduce-overhead")
    for _ in range(3):
        x = numbers(N)
        assert_near(function(x), torch.sin(x.cpu().double()) * 2)


def test_operators_of_foo_ops():
    import foo_ops

    query, key, value = (numbers(1, 2, 9, 16) for _ in range(3))
    graph, result = capture(
        lambda: foo_ops.silu_mul(foo_ops.attention(query, key, value)[0], value)
    )
    query.normal_()
    graph.replay()
    assert torch.equal(result, foo_ops.silu_mul(foo_ops.attention(query, key, value)[0], value))


def test_dropout_of_attention():
    query = numbers(1, 2, 40, 16)
    attention = nn.functional.scaled_dot_product_attention
    graph, result = capture(lambda: attention(query, query, query, dropout_p=0.5))
    torch.manual_seed(3)
    graph.replay()
    first = result.clone()
    graph.replay()
    second = result.clone()
    torch.manual_seed(3)
    assert torch.equal(first, attention(query, query, query, dropout_p=0.5))
    assert torch.equal(second, attention(query, query, query, dropout_p=0.5))
    assert not torch.equal(first, second)


def test_a_graph_can_be_kept_and_written_down(tmp_path):
    x = torch.ones(2, 3, device="foo")
    graph = torch.foo.FooGraph(keep_graph=True)
    with torch.foo.graph(graph):
        y = x.exp() + 1
    graph.instantiate()
    with pytest.raises(RuntimeError, match=r"debug_dump: call enable_debug_mode\(\) first"):
        graph.debug_dump(str(tmp_path / "graph.dot"))
    graph.enable_debug_mode()
    graph.debug_dump(str(tmp_path / "graph.dot"))
    assert (tmp_path / "graph.dot").read_text().splitlines() == [
        "digraph {",
        '  0 [label="aten::exp Float[2, 3]"];',
        '  1 [label="aten::add.Tensor Float[2, 3] Long[]"];',
        "  0 -> 1;",
        "}",
    ]
    graph.replay()
    assert torch.equal(y, x.exp() + 1)
