"""Users' variants of flex attention, in every dtype, against the dense float64 formula."""

import functools

import pytest
import torch
from support.flex_exact import Tensors, assert_results, cotangents_of, exact_of, qkv, results_of
from support.flex_variants import BATCH, HEADS, KEYS, QUERIES, SIZES, VARIANTS
from torch.nn.attention.flex_attention import create_block_mask

import foo_ops

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check(name, dtype, device, blocks=None, **shapes):
    """Compute a variant, with a block mask of this block size if one is given."""
    ours, exact = Tensors(device, dtype), Tensors("cpu", torch.float64, dtype)
    score_mod, mask_mod = VARIANTS[name](ours.new, ours.integers)
    exact_score_mod, exact_mask_mod = VARIANTS[name](exact.new, exact.integers)
    inputs = qkv(SIZES, dtype, device, **shapes)
    mask = mask_mod
    if blocks is not None:
        sizes = (BATCH, HEADS, QUERIES, KEYS)
        mask = create_block_mask(mask_mod, *sizes, device=device, BLOCK_SIZE=blocks)
    function = functools.partial(
        foo_ops.flex_attention,
        score_mod=score_mod,
        block_mask=mask,
        enable_gqa=True,
        return_lse=True,
    )
    cotangents = cotangents_of(inputs[0], inputs[2], dtype)
    results = results_of(function, inputs, ours.made, cotangents)
    expected = exact_of(inputs, exact.made, cotangents, exact_score_mod, exact_mask_mod)
    assert_results(results, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_values_and_gradients(name, dtype, device):
    check(name, dtype, device)


def masked():
    return [
        name
        for name, make in VARIANTS.items()
        if make(Tensors("cpu", torch.float32).new, Tensors("cpu", torch.float32).integers)[1]
    ]


@pytest.mark.parametrize("blocks", [16, 128])
@pytest.mark.parametrize("name", masked())
def test_with_a_mask_of_blocks(name, blocks, device):
    check(name, torch.float32, device, blocks)


@pytest.mark.parametrize("name", ["documents_with_alibi", "relative_position_table", "dense_bias"])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_shared_key_heads(name, key_heads, device):
    check(name, torch.float32, device, key_heads=key_heads, value_dim=24)
