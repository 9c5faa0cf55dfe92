"""scaled_dot_product_attention on foo takes nested tensors as the CPU does."""

import pytest
import torch
import torch.nn.functional as F
from support.exact import assert_near, exact_copy

pytestmark = pytest.mark.usefixtures("one_thread")

NESTED = {"cpu": torch.float64, "foo:1": torch.float32}
"""Dtypes of nested tensors, by device: exact results on the CPU, and those compared with them."""


def nested_heads(layout, device):
    """Make three sequences, with two heads of eight numbers each."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(length, 16, generator=generator) for length in (5, 3, 7)]
    parts = [part.to(NESTED[device]) for part in parts]
    leaf = torch.nested.nested_tensor(parts, layout=layout, device=device, requires_grad=True)
    heads = []
    for input in (leaf, leaf * 0.5, leaf + 1):
        if layout == torch.strided:
            heads.append(input.view(3, -1, 2, 8).transpose(1, 2).contiguous())
        else:
            heads.append(input.unflatten(-1, (2, 8)).transpose(1, 2))
    return leaf, heads


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout):
    results = []
    for device in NESTED:
        leaf, heads = nested_heads(layout, device)
        output = F.scaled_dot_product_attention(*heads)
        assert output.is_nested
        assert output.device == torch.device(device)
        loss = sum((part * (n + 1)).square().sum() for n, part in enumerate(output.unbind()))
        (gradient,) = torch.autograd.grad(loss, leaf)
        results.append([*output.detach().unbind(), *gradient.unbind()])
    for expected, actual in zip(*results):
        assert actual.device == torch.device("foo:1")
        assert_near(actual, expected)


def test_inference_with_nested_tensors():
    with torch.inference_mode():
        expected, actual = (
            F.scaled_dot_product_attention(*nested_heads(torch.strided, device)[1])
            for device in NESTED
        )
        assert_near(actual.to_padded_tensor(0), expected.to_padded_tensor(0))


def test_encoder_makes_nested_tensors_of_padded_ones():
    """Without gradients, torch.nn.TransformerEncoder runs its own nested kernels."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    data, padding = torch.randn(3, 7, 16), torch.arange(7) >= torch.tensor([[5], [3], [7]])
    with torch.no_grad():
        expected = exact_copy(model)(data.double(), src_key_padding_mask=padding)
        actual = model.foo()(data.foo(), src_key_padding_mask=padding.foo())
    assert actual.device == torch.device("foo:0")
    assert_near(actual, expected)
