"""LSTM, GRU and RNN on foo match the CPU: values, gradients, second derivatives."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

LENGTHS = torch.tensor([6, 5, 2, 1])

LAYERS = {
    "lstm": lambda: nn.LSTM(5, 7),
    "gru": lambda: nn.GRU(5, 7),
    "tanh": lambda: nn.RNN(5, 7),
    "relu": lambda: nn.RNN(5, 7, nonlinearity="relu"),
    "deep": lambda: nn.LSTM(5, 7, num_layers=2, bidirectional=True),
    "batch_first": lambda: nn.GRU(5, 7, batch_first=True, bias=False),
    "projection": lambda: nn.LSTM(5, 7, proj_size=3),
    "dropout": lambda: nn.LSTM(5, 7, num_layers=2, dropout=0.5),
    "dropout_batch_first": lambda: nn.GRU(
        5, 7, num_layers=3, dropout=0.3, batch_first=True, bidirectional=True
    ),
    "dropout_projection": lambda: nn.LSTM(5, 7, num_layers=2, dropout=0.5, proj_size=3),
}


def results_of(layer, x, packed):
    torch.manual_seed(1)
    sequence = pack_padded_sequence(x, LENGTHS, layer.batch_first) if packed else x
    output, state = layer(sequence)
    results = [output.data if packed else output, *(state if isinstance(state, tuple) else [state])]
    inputs = [x, *layer.parameters()]
    loss = sum(each.sin().sum() for each in results)
    gradients = torch.autograd.grad(loss, inputs, create_graph=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in gradients), inputs)
    return [*results, *gradients, *second]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_like_on_cpu(name, packed):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    there = copy.deepcopy(layer).to("foo:1")
    x = torch.randn((4, 6, 5) if layer.batch_first else (6, 4, 5), dtype=torch.float64)
    actual = results_of(there, x.to("foo:1").requires_grad_(), packed)
    expected = results_of(layer, x.requires_grad_(), packed)
    for one, other in zip(actual, expected):
        assert one.device == torch.device("foo:1")
        torch.testing.assert_close(one.detach().cpu(), other.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_kernels(dtype):
    layer = nn.LSTM(5, 7, dtype=dtype)
    x = torch.randn(6, 4, 5, dtype=dtype)
    there = copy.deepcopy(layer).foo()
    torch.foo.reset_operator_counts()
    with torch.no_grad():
        assert torch.equal(there(x.foo())[0].cpu(), layer(x)[0])
        with torch.inference_mode():
            assert there(x.foo())[0].is_inference()
    counts = torch.foo.operator_counts()
    assert counts["aten::lstm.input"].fallback == 2
    assert "aten::_thnn_fused_lstm_cell" not in counts


def test_kernels_with_dropout():
    """Each layer is one operator, and dropout draws from foo's generator."""
    layer = nn.LSTM(5, 7, num_layers=3, dropout=0.5).foo()
    x = torch.randn(6, 4, 5, device="foo", requires_grad=True)
    layer(x)
    torch.foo.reset_operator_counts()
    torch.foo.manual_seed(3)
    output = layer(x)[0]
    counts = torch.foo.operator_counts()
    assert counts["aten::lstm.input"].fallback == 3
    assert "aten::_thnn_fused_lstm_cell" not in counts
    torch.foo.manual_seed(3)
    assert torch.equal(layer(x)[0], output)
    assert not torch.equal(layer(x)[0], output)
    assert torch.equal(layer.eval()(x)[0], layer(x)[0])


def edges_to_host(output):
    """Return the places of the tensors whose gradients the CPU's operators compute."""
    found, waiting, seen = set(), [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, place in node.next_functions:
            if following is not None and "ToHost" in following.name():
                found.add(place)
            waiting.append(following)
    return found


def test_only_what_needs_a_gradient():
    layer = nn.GRU(5, 7).foo()
    layer.bias_hh_l0.requires_grad_(False)
    # Input, state, and the weights in their order.
    assert edges_to_host(layer(torch.randn(6, 4, 5, device="foo"))[0]) == {2, 3, 4}
    x = torch.randn(6, 4, 5, device="foo", requires_grad=True)
    assert edges_to_host(layer(x)[0]) == {0, 2, 3, 4}
    with torch.no_grad():
        output, state = layer(x)
    assert not output.requires_grad
    assert not state.requires_grad


def test_written_weights():
    layer = nn.LSTM(5, 7).foo()
    loss = layer(torch.randn(6, 4, 5, device="foo"))[0].sum()
    with torch.no_grad():
        layer.weight_hh_l0.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_functions_of_torch():
    """Transforms, autocast and fake tensors see a layer's separate operators."""
    layer = nn.LSTM(5, 7).foo()
    x = torch.randn(6, 4, 5, device="foo")
    layer(x)[0].sum().backward()

    def loss(weight):
        return torch.func.functional_call(layer, {"weight_hh_l0": weight}, (x,))[0].sum()

    gradient = torch.func.grad(loss)(layer.weight_hh_l0.detach())
    torch.testing.assert_close(gradient, layer.weight_hh_l0.grad)
    with torch.autocast("foo", dtype=torch.bfloat16):
        assert layer(x)[0].dtype == torch.bfloat16
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x))[0].shape == (6, 4, 7)


def test_refusals():
    layer = nn.LSTM(5, 7).foo()
    with pytest.raises(RuntimeError, match="not at the same device"):
        layer(torch.randn(6, 4, 5))


def test_memory():
    layer = nn.LSTM(64, 64).foo()
    x = torch.randn(32, 8, 64, device="foo")
    before = torch.foo.memory_allocated()
    output, _ = layer(x)
    assert torch.foo.memory_allocated() - before >= output.nbytes
    del output, _
    assert torch.foo.memory_allocated() == before
