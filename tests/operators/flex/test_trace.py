"""Programs and their gradients compute what the functions do, at every place."""

import itertools

import pytest
import torch
from support.score_mods import MAKERS, SIZES, mask_mods

from foo_ops.ops.flex_attention.derivatives import evaluate
from foo_ops.ops.flex_attention.trace import trace


class Maker:
    """Makes captured tensors, and remembers which require gradients."""

    def __init__(self, device, dtype=torch.float64):
        self.device, self.dtype, self.tensors = device, dtype, []
        self.generator = torch.Generator().manual_seed(0)

    def new(self, *shape):
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        self.tensors.append(values.to(self.device, self.dtype).requires_grad_())
        return self.tensors[-1]

    def integers(self, high, *shape):
        return torch.randint(high, shape, generator=self.generator).to(self.device)


def places(device):
    """Return the indices of batches, heads, queries and keys, which broadcast with the scores."""
    return [
        torch.arange(size, device=device, dtype=torch.int32).view(
            [-1 if at == dim else 1 for at in range(4)]
        )
        for dim, size in enumerate(SIZES)
    ]


def one_by_one(function, *scores):
    """Call a function for each score alone, as Python evaluates it."""
    results = []
    for place in itertools.product(*map(range, SIZES)):
        indices = (torch.tensor(it, dtype=torch.int32) for it in place)
        results.append(function(*(it[place] for it in scores), *indices).reshape(()))
    return torch.stack(results).view(SIZES)


def scores(device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SIZES, generator=generator, dtype=torch.float64).to(device)


@pytest.mark.parametrize("name", MAKERS)
def test_values_and_gradients(name, device):
    exact, ours = Maker("cpu"), Maker(device)
    functions = [MAKERS[name](it.new, it.integers) for it in (exact, ours)]
    grad = scores().roll(1) + 1

    score = scores().requires_grad_()
    expected = one_by_one(functions[0], score).to(torch.float64)
    inputs = [score, *exact.tensors]
    expected_grads = [torch.zeros_like(it) for it in inputs]
    if expected.requires_grad:
        expected_grads = torch.autograd.grad(
            expected, inputs, grad, allow_unused=True, materialize_grads=True
        )

    traced = trace(functions[1], None, torch.empty(0, dtype=torch.float64, device=device))
    rest = (*places(device), traced.captured, traced.numbers, traced.integers)
    output = evaluate(traced.score_mod, scores(device), *rest).output
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(output.expand(SIZES).cpu(), expected, **close)

    if not traced.backward:
        torch.testing.assert_close(expected_grads[0], grad, rtol=0, atol=0)
        assert not traced.captured
        return
    values = evaluate(traced.backward, scores(device), *rest, grad=grad.to(device))
    torch.testing.assert_close(values.output.expand(SIZES).cpu(), expected_grads[0], **close)
    sums = values.gradients(traced.captured)
    pairs = [
        (it, total) for it, total in zip(traced.captured, sums, strict=True) if it.requires_grad
    ]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))
    for tensor, wanted in zip(ours.tensors, expected_grads[1:], strict=True):
        torch.testing.assert_close(tensor.grad.cpu(), wanted, **close)


@pytest.mark.parametrize("name", mask_mods(Maker("cpu").integers))
def test_masks(name, device):
    exact, ours = (mask_mods(Maker(it).integers)[name] for it in ("cpu", device))
    traced = trace(None, ours, torch.empty(0, device=device))
    rest = (traced.captured, traced.numbers, traced.integers)
    output = evaluate(traced.mask_mod, scores(device), *places(device), *rest).output
    assert output.dtype == torch.bool
    assert torch.equal(output.expand(SIZES).cpu(), one_by_one(exact))
