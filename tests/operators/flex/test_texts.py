"""A program's text describes the computation and nothing of one call."""

import pytest
import torch
from support.score_mods import MAKERS
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from foo_ops.ops.flex_attention.trace import Traced, trace


def texts(score_mod=None, mask_mod=None, dtype=torch.float32):
    traced = trace(score_mod, mask_mod, torch.empty(0, dtype=dtype))
    return traced.score_mod, traced.mask_mod, traced.backward


def make(name, factor):
    def new(*shape):
        return torch.randn([size * factor for size in shape] or ()).requires_grad_()

    def integers(high, *shape):
        return torch.randint(high, [size * factor for size in shape])

    return MAKERS[name](new, integers)


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"temperature", "table_in_steps"}))
def test_sizes_and_values_are_not_in_it(name):
    assert texts(make(name, 1)) == texts(make(name, 2))


def test_numbers_are_not_in_it():
    def score_mod(slope, window):
        return lambda score, b, h, q, k: torch.where(q - k < window, score * slope, slope)

    assert texts(score_mod(0.5, 3)) == texts(score_mod(3.0, 3))
    traced = trace(score_mod(0.5, 3), None, torch.empty(0))
    assert traced.numbers == [0.5, 0.5, 0.0, 0.5]
    assert traced.integers == [3]


def test_text():
    table = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)

    def score_mod(score, b, h, q, k):
        return score * 2 + table[h, q - k]

    traced = trace(score_mod, lambda b, h, q, k: (q >= k) & (q - k < 5), torch.empty(0))
    assert traced.score_mod.splitlines() == [
        "float32 input score",
        "float32 number 0",
        "float32 mul 0 1",
        "int32 input head",
        "int32 input query",
        "int32 input key",
        "int32 sub 4 5",
        "bfloat16 load 0 3 6",
        "float32 cast 7",
        "float32 add 2 8",
        "output 9",
    ]
    assert traced.backward.splitlines() == [
        "float32 input grad",
        "float32 number 1",
        "float32 mul 0 1",
        "int32 input head",
        "int32 input query",
        "int32 input key",
        "int32 sub 4 5",
        "output 2",
        "gradient 0 0 3 6",
    ]
    assert traced.mask_mod.splitlines() == [
        "int32 input query",
        "int32 input key",
        "bool ge 0 1",
        "int32 sub 0 1",
        "int32 integer 0",
        "bool lt 3 4",
        "bool and 2 5",
        "output 6",
    ]
    assert [id(it) for it in traced.captured] == [id(table)]
    assert (traced.numbers, traced.integers) == ([2.0, 2.0], [5])


def test_what_changes_nothing_has_no_text():
    slopes = torch.arange(4)
    assert trace(None, None, torch.empty(0)) == Traced()
    assert trace(lambda score, b, h, q, k: score, noop_mask, torch.empty(0)) == Traced()
    assert texts(lambda score, b, h, q, k: score + slopes[h] * (k - q))[2] == ""
    assert texts(lambda score, b, h, q, k: score * slopes[h])[2] != ""
    assert texts(lambda score, b, h, q, k: slopes[h])[2] == "float32 number 0\noutput 0"


def test_all_floating_point_tensors_have_gradients():
    def score_mod(slopes):
        return lambda score, b, h, q, k: score + slopes[h] * (k - q)

    backward = texts(score_mod(torch.ones(4)))[2]
    assert backward.splitlines()[-2:] == ["output 0", "gradient 0 5 6"]
    assert texts(score_mod(torch.ones(4, requires_grad=True)))[2] == backward
    with torch.no_grad():
        assert texts(score_mod(torch.ones(4, requires_grad=True)))[2] == ""


def test_no_gradient_where_none_is_asked_for():
    with torch.no_grad():
        assert texts(lambda score, b, h, q, k: score * 2)[2] == ""


def test_composed_masks_bring_nothing_of_their_own():
    def causal(b, h, q, k):
        return q >= k

    assert texts(None, and_masks(causal, noop_mask)) == texts(None, causal)
    assert texts(None, or_masks(causal, causal)) == texts(None, causal)


def test_equal_operations_are_one():
    table = torch.ones(4, 4)
    once = texts(lambda score, b, h, q, k: torch.exp(table[h, k] + score))
    assert once[0].count("load") == 1

    def twice(score, b, h, q, k):
        first, second = (torch.exp(table[h, k] + score) for _ in range(2))
        return torch.where(q > k, first, second)

    assert texts(twice)[0] == once[0]


def test_what_is_around_a_trace_does_not_change_it():
    def score_mod(score, b, h, q, k):
        return torch.exp(torch.tanh(score)) ** 2.5

    alone = texts(score_mod)
    with torch.autocast("cpu", torch.bfloat16):
        assert texts(score_mod) == alone
    with torch.autograd.graph.save_on_cpu():
        assert texts(score_mod) == alone
    results = []
    torch.func.vmap(lambda x: (results.append(texts(score_mod)), x)[1])(torch.ones(2))
    torch.func.grad(lambda x: (results.append(texts(score_mod)), x)[1])(torch.ones(()))
    assert results == [alone, alone]


def test_inference_mode():
    with torch.inference_mode():
        factor = torch.ones(())
        assert texts(lambda score, b, h, q, k: score * factor)[0].endswith("output 2")
