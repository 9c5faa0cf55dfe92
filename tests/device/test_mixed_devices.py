"""foo's own kernels refuse tensors of several devices, like those of other accelerators."""

import re
from typing import Any

import pytest
import torch
from torch import nn

aten = torch.ops.aten
OTHERS = ["cpu", "foo:1"]


def message(argument: str, device: str, operator: str) -> str:
    return re.escape(
        f"Expected all tensors to be on the same device, but got {argument} is on {device}, "
        f"different from other tensors on foo:0 (when checking argument in method {operator})"
    )


def check_refused(operator: Any, arguments: dict[str, Any]) -> None:
    """Put each tensor but the first on another device in turn; each call must be refused."""
    operator(**arguments)
    _, *names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    for name in names:
        for device in OTHERS:
            mixed = arguments | {name: arguments[name].to(device)}
            with pytest.raises(RuntimeError, match=message(name, device, operator.name())):
                operator(**mixed)


def rand(*size: int) -> torch.Tensor:
    return torch.rand(size, device="foo")


def test_lstm_cell() -> None:
    gates, state, bias = rand(2, 16), rand(2, 4), rand(16)
    arguments = {"input_gates": gates, "hidden_gates": gates, "cx": state}
    check_refused(
        aten._thnn_fused_lstm_cell.default,
        arguments | {"input_bias": bias, "hidden_bias": bias},
    )
    backward = {"grad_hy": state, "grad_cy": state, "cx": state, "cy": state, "workspace": gates}
    check_refused(aten._thnn_fused_lstm_cell_backward_impl.default, backward | {"has_bias": True})


def test_gru_cell() -> None:
    gates, state, bias = rand(2, 12), rand(2, 4), rand(12)
    arguments = {"input_gates": gates, "hidden_gates": gates, "hx": state}
    check_refused(
        aten._thnn_fused_gru_cell.default, arguments | {"input_bias": bias, "hidden_bias": bias}
    )
    backward = {"grad_hy": state, "workspace": rand(2, 20), "has_bias": True}
    check_refused(aten._thnn_fused_gru_cell_backward.default, backward)


def test_the_first_tensor_on_another_device() -> None:
    gates, state = rand(2, 16), rand(2, 4)
    expected = message("input_gates", "cpu", "aten::_thnn_fused_lstm_cell")
    with pytest.raises(RuntimeError, match=expected):
        aten._thnn_fused_lstm_cell(gates.cpu(), gates, state)


@pytest.mark.parametrize("device", OTHERS)
def test_modules(device: str) -> None:
    x, state = rand(2, 3), rand(2, 4)
    cell = nn.LSTMCell(3, 4, device="foo")
    with pytest.raises(RuntimeError, match=message("cx", device, "aten::_thnn_fused_lstm_cell")):
        cell(x, (state, state.to(device)))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        cell(x, (state.to(device), state))
    for cell in (nn.GRUCell(3, 4, device="foo"), nn.RNNCell(3, 4, device="foo")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            cell(x, state.to(device))
    hidden = rand(1, 2, 4)
    expected = "Input and hidden tensors are not at the same device"
    with pytest.raises(RuntimeError, match=expected):
        nn.LSTM(3, 4, device="foo")(rand(5, 2, 3), (hidden, hidden.to(device)))
    for module in (nn.GRU(3, 4, device="foo"), nn.RNN(3, 4, device="foo")):
        with pytest.raises(RuntimeError, match=expected):
            module(rand(5, 2, 3), hidden.to(device))


@pytest.mark.parametrize("device", OTHERS)
def test_attention(device: str) -> None:
    query, mask = rand(1, 2, 5, 4), rand(5, 5)
    operator = aten._scaled_dot_product_fused_attention_overrideable.default
    arguments = {"query": query, "key": query, "value": query, "attn_bias": mask}
    check_refused(operator, arguments)
    with pytest.raises(RuntimeError, match=r"on the same device|same device type"):
        nn.functional.scaled_dot_product_attention(query, query.to(device), query)
    with pytest.raises(RuntimeError, match="on the same device"):
        nn.functional.scaled_dot_product_attention(query, query, query, mask.to(device))


@pytest.mark.parametrize("device", OTHERS)
def test_storages(device: str) -> None:
    tensor = rand(3)
    with pytest.raises(RuntimeError, match=r"same device|devices must match"):
        tensor.set_(torch.rand(3).to(device))
    with pytest.raises(RuntimeError, match=r"same device|devices must match"):
        tensor.set_(torch.rand(3).to(device).untyped_storage())
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([tensor, tensor.to(device)])


@pytest.mark.parametrize("device", OTHERS)
def test_convolution(device: str) -> None:
    x, weight, bias = rand(1, 2, 5, 5), rand(3, 2, 3, 3), rand(3)
    for mixed in ((x.to(device), weight, bias), (x, weight.to(device), bias)):
        with pytest.raises(RuntimeError, match=r"same device|should be the same"):
            nn.functional.conv2d(*mixed)
    with pytest.raises(RuntimeError, match=r"same device|should be the same"):
        nn.functional.conv2d(x, weight, bias.to(device))


def test_copies_go_between_devices() -> None:
    tensor = rand(3)
    for device in OTHERS:
        there = torch.empty(3, device=device).copy_(tensor)
        assert torch.equal(there.to("foo:0"), tensor)
        assert torch.equal(torch.empty(0, device="foo").resize_as_(there).copy_(there), tensor)
