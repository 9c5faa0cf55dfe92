"""Flex attention within torch.compile: functions become programs, captured tensors inputs."""

import pytest
import torch
from support.parts import whole
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree as pytree

import foo_ops

LENGTHS = (37, 41, 50)


def causal(b, h, q, k):
    return q >= k


def nothing(query, slopes, table):
    return foo_ops.flex_attention(query, query.sin(), query.cos())


def logsumexp(query, slopes, table):
    keys, values = query.sin(), query.cos()
    return foo_ops.flex_attention(query, keys, values, None, causal, scale=0.3, return_lse=True)


def captured(query, slopes, table):
    def score_mod(score, b, h, q, k):
        return score * slopes[h] * 1.5 + (table * 2).T[h, k] + table[1, h]

    return foo_ops.flex_attention(query, query.sin(), query.cos(), score_mod, causal)


def constants(query, slopes, table):
    def score_mod(score, b, h, q, k):
        return score * torch.tensor(0.25) + torch.arange(2.0, device=query.device)[h] * slopes[h]

    return foo_ops.flex_attention(query, query.sin(), query.cos(), score_mod)


def lengths(query, slopes, table):
    size = query.shape[2]

    def score_mod(score, b, h, q, k):
        return score + (q - k) / size * slopes[h]

    def mask_mod(b, h, q, k):
        return (k < size - 2) & (k > size // 3)

    return foo_ops.flex_attention(query, query.sin(), query.cos(), score_mod, mask_mod)


def two_functions(query, slopes, table):
    def tanh(score, b, h, q, k):
        return torch.tanh(score) + table[q, h]

    first = foo_ops.flex_attention(
        *(query, query.sin(), query.cos()), lambda score, b, h, q, k: score * slopes[h], causal
    )
    return foo_ops.flex_attention(first, query.sin(), query.cos(), tanh)


def packed(query, slopes, table):
    """Pack two sequences, the second of which has the length that changes."""
    tokens = query.squeeze(0).transpose(0, 1)
    starts = torch.tensor([0, 5, tokens.shape[0]], dtype=torch.int32, device=query.device)

    def score_mod(score, b, h, q, k):
        return score * slopes[h] + table[q, b]

    longest = tokens.shape[0]
    return foo_ops.flex_attention_varlen(
        *(tokens, tokens.sin(), tokens.cos(), starts, starts, score_mod, causal),
        max_seqlen_q=longest,
        max_seqlen_k=longest,
    )


def inputs_of(length, device):
    generator = torch.Generator().manual_seed(length)
    shapes = ((1, 2, length, 16), (2,), (64, 2))
    tensors = (torch.randn(it, generator=generator, dtype=torch.float64) for it in shapes)
    return [it.to(device).requires_grad_() for it in tensors]


def values_and_gradients(function, inputs):
    outputs = pytree.tree_leaves(function(*inputs))
    total = sum(it.square().sum() for it in outputs)
    return outputs, torch.autograd.grad(total, inputs, allow_unused=True)


def check(function, compiled, inputs):
    actual, expected = (values_and_gradients(it, inputs) for it in (compiled, function))
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("backend", ["aot_eager", *whole("inductor")])
@pytest.mark.parametrize(
    "function", [captured, lengths, *whole(nothing, logsumexp, constants, two_functions, packed)]
)
def test_lengths_that_change(device, function, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for length in LENGTHS:
        check(function, compiled, inputs_of(length, device))
    assert counter.frame_count == 1


class CacheLayer:
    """A cache layer that allocates its tensors at the first call."""

    def __init__(self):
        self.is_ready = False

    def update(self, keys):
        if not self.is_ready:
            self.dtype = keys.dtype
            self.keys = torch.tensor([], dtype=self.dtype, device=keys.device)
            self.is_ready = True
        self.keys = torch.cat([self.keys, keys], dim=-2)
        return self.keys


def test_objects_that_are_made_before_a_call_and_change_behind_it(device):
    torch._dynamo.reset()

    def attend(query, slopes, table):
        layers = [CacheLayer(), CacheLayer()]
        for layer in layers:
            keys = layer.update(query)
            query = foo_ops.flex_attention(
                *(query, keys, keys), lambda s, b, h, q, k: s * slopes[h], causal
            )
        return query, layers[1].keys, layers[1].is_ready

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs = inputs_of(LENGTHS[0], device)
    *actual, is_ready = compiled(*inputs)
    *expected, _ = attend(*inputs)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    assert is_ready


@pytest.mark.parametrize("device", ["foo", *whole("cpu")])
def test_block_masks(device):
    torch._dynamo.reset()

    def attend(query, slopes, table, block_mask):
        return foo_ops.flex_attention(
            *(query, query.sin(), query.cos()), lambda s, b, h, q, k: s * slopes[h], block_mask
        )

    compiled = torch.compile(attend, fullgraph=True)
    for length in LENGTHS:
        query, slopes, table = inputs_of(length, device)
        mask = create_block_mask(causal, None, None, length, length, device, BLOCK_SIZE=16)
        outputs = [it(query, slopes, table, mask) for it in (attend, compiled)]
        torch.testing.assert_close(*outputs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("device", ["foo", *whole("cpu")])
def test_numbers_that_change(device):
    torch._dynamo.reset()

    def attend(query, factor, shift):
        def score_mod(score, b, h, q, k):
            return score * factor + (q - k) * shift

        return foo_ops.flex_attention(query, query.sin(), query.cos(), score_mod)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    query = inputs_of(37, device)[0]
    for factor, shift in ((0.5, 2), (0.25, 3), (3.0, 5)):
        actual, expected = (it(query, factor, shift) for it in (compiled, attend))
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


class Layer(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        table = torch.randn((64, 2), generator=generator, dtype=torch.float64).to(device)
        self.table = torch.nn.Parameter(table)

    def score_mod(self, score, b, h, q, k):
        return score + torch.tanh(self.table)[q - k + 32, h]

    def forward(self, query):
        return foo_ops.flex_attention(query, query.sin(), query.cos(), self.score_mod, causal)


def test_a_parameter_is_trained(device):
    torch._dynamo.reset()
    tables = []
    for is_compiled in (False, True):
        layer = Layer(device)
        module = torch.compile(layer, fullgraph=True) if is_compiled else layer
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        for seed in range(2):
            optimizer.zero_grad()
            query = torch.randn((1, 2, 20, 16), generator=torch.Generator().manual_seed(seed))
            module(query.double().to(device)).square().sum().backward()
            optimizer.step()
        tables.append(layer.table.detach())
    torch.testing.assert_close(*tables, atol=1e-12, rtol=1e-12)
    assert not torch.equal(tables[1], Layer(device).table.detach())


def test_without_gradients(device):
    torch._dynamo.reset()
    inputs = inputs_of(37, device)
    compiled = torch.compile(captured, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), captured(*inputs), atol=1e-12, rtol=1e-12)


def test_autocast():
    torch._dynamo.reset()
    inputs = [it.detach().float() for it in inputs_of(37, "cpu")]
    compiled = torch.compile(captured, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = (it(*inputs) for it in (compiled, captured))
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected)


def test_what_is_refused():
    torch._dynamo.reset()

    def attend(query):
        return foo_ops.flex_attention(query, query, query, lambda s, b, h, q, k: torch.atan(s))

    message = "must be made of operations on single numbers, got torch.atan"
    with pytest.raises(Exception, match=message):
        torch.compile(attend, fullgraph=True)(torch.randn(1, 2, 8, 16))


class Model(torch.nn.Module):
    """Attends with a parameter, a buffer and the length, as model layers do."""

    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.5, 2.0]))
        self.register_buffer("table", torch.linspace(-1, 1, 128).view(64, 2))

    def forward(self, query):
        size = query.shape[2]

        def score_mod(score, b, h, q, k):
            return score * self.slopes[h] * torch.tensor(0.5) + (self.table * 2).T[h, k] / size

        def mask_mod(b, h, q, k):
            return (q >= k) | (k > size - 3)

        return foo_ops.flex_attention(query, query.sin(), query.cos(), score_mod, mask_mod)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("is_strict", [False, True])
def test_export(is_strict, is_dynamic):
    torch._dynamo.reset()
    model, query = Model(), torch.randn(1, 2, 37, 16)
    shapes = ({2: torch.export.Dim("length", min=2, max=60)},) if is_dynamic else None
    exported = torch.export.export(model, (query,), strict=is_strict, dynamic_shapes=shapes)
    for module in (exported.module(), exported.run_decompositions().module()):
        for length in (37, 50) if is_dynamic else (37,):
            query = torch.randn(1, 2, length, 16)
            torch.testing.assert_close(module(query), model(query))
            actual, expected = (
                torch.autograd.grad(it(query).square().sum(), tuple(it.parameters()))
                for it in (module, model)
            )
            torch.testing.assert_close(actual, expected)
