"""foo::attention in the table of operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from foo_ops.testing import reference
from foo_ops.testing.spec import OpSpec, Sample
from foo_ops.testing.specs.attention_error import gradient_budget, output_budget
from foo_ops.testing.specs.attention_samples import (
    attention_sample,
    half_infinite_bias,
    large_scores,
    large_scores_with_sinks,
    large_scores_with_softcap,
    mask_of_parts,
    random_bias,
    random_mask,
    random_slopes,
    rising_scores,
)

SMALL: dict[str, Any] = {"queries": 3, "keys": 5, "head_dim": 3}

HEAD_DIMS = (1, 3, 16, 37, 64, 80, 128, 256)

LENGTHS = ((1, 1), (1, 129), (63, 64), (64, 65), (65, 63), (127, 129), (129, 127), (130, 1))

HEADS = ((1, 1), (2, 1), (4, 2), (8, 1), (6, 2), (4, 4))

MANY_KEYS = (1, 63, 511, 512, 513, 1025, 5000)

PLAIN_SAMPLES: dict[str, Callable[[torch.dtype], Sample]] = {
    "plain": attention_sample(),
    "causal": attention_sample(queries=11, is_causal=True),
    "more keys than queries, causal": attention_sample(queries=7, keys=13, is_causal=True),
    "more queries than keys, causal": attention_sample(queries=13, keys=7, is_causal=True),
    **{f"head dim {dim}": attention_sample(head_dim=dim, keys=66) for dim in HEAD_DIMS},
    "value dim 5 of 16": attention_sample(value_dim=5),
    "value dim 100 of 8": attention_sample(head_dim=8, value_dim=100, is_causal=True),
    "value dim 1 of 256": attention_sample(head_dim=256, value_dim=1),
    "value dim 512 of 576": attention_sample(head_dim=576, value_dim=512, queries=9, keys=70),
    **{
        f"{queries} queries, {keys} keys{', causal' * is_causal}": attention_sample(
            batch=1, queries=queries, keys=keys, is_causal=is_causal
        )
        for queries, keys in LENGTHS
        for is_causal in (False, True)
    },
    **{
        f"{heads} heads on {key_heads}{', causal' * is_causal}": attention_sample(
            heads=heads, key_heads=key_heads, queries=70, is_causal=is_causal
        )
        for heads, key_heads in HEADS
        for is_causal in (False, True)
    },
    "no batch": attention_sample(batch=0),
    "no heads": attention_sample(heads=0),
    "no queries": attention_sample(queries=0),
    "no keys": attention_sample(keys=0),
    "no keys, causal": attention_sample(keys=0, is_causal=True),
    "no keys, bias": attention_sample(keys=0, bias=random_bias(2, 1, 9, 1)),
    "no queries, bias": attention_sample(queries=0, bias=random_bias(1, 1, 1, 11)),
    "scale 0": attention_sample(scale=0.0),
    "scale 3": attention_sample(scale=3.0, is_causal=True),
    "negative scale": attention_sample(scale=-0.5, bias=random_bias(9, 11)),
    "large scores": large_scores,
    "rising scores": rising_scores(3, 300),
    "bias (Sq, Sk)": attention_sample(bias=random_bias(9, 11)),
    "bias (1, 1, 1, Sk)": attention_sample(bias=random_bias(1, 1, 1, 11)),
    "bias (Sk)": attention_sample(bias=random_bias(11), is_causal=True),
    "bias (B, 1, Sq, Sk)": attention_sample(bias=random_bias(2, 1, 9, 11)),
    "bias (B, 1, 1, Sk)": attention_sample(bias=random_bias(2, 1, 1, 11)),
    "bias (1, H, 1, 1)": attention_sample(bias=random_bias(1, 2, 1, 1)),
    "bias (H, Sq, Sk)": attention_sample(bias=random_bias(2, 9, 11), is_causal=True),
    "bias (B, H, Sq, Sk)": attention_sample(bias=random_bias(2, 2, 9, 11)),
    "bias (Sq, 1)": attention_sample(bias=random_bias(9, 1)),
    "bias 0-d": attention_sample(bias=random_bias()),
    "bias (1, 1)": attention_sample(bias=random_bias(1, 1), is_causal=True),
    "bias in float32": attention_sample(bias=random_bias(2, 9, 11, float32=True)),
    "bias over several tiles": attention_sample(
        queries=130, keys=131, bias=random_bias(130, 131), is_causal=True
    ),
    "bias (B, 1, 1, Sk) over several tiles": attention_sample(
        queries=130, keys=131, bias=random_bias(2, 1, 1, 131)
    ),
    "bias (1, H, Sq, 1) over several tiles": attention_sample(
        queries=130, keys=131, bias=random_bias(1, 2, 130, 1)
    ),
    "bias 0-d over several tiles": attention_sample(queries=130, keys=131, bias=random_bias()),
    "bias for grouped heads": attention_sample(
        heads=6, key_heads=2, bias=random_bias(6, 9, 11), is_causal=True
    ),
    "bias (H, Sq, 1) for grouped heads": attention_sample(
        heads=6, key_heads=2, bias=random_bias(6, 9, 1)
    ),
    "bias (B, 1, 1, Sk) for grouped heads": attention_sample(
        heads=6, key_heads=2, bias=random_bias(2, 1, 1, 11)
    ),
    "bias (Sq, Sk) for grouped heads over several tiles": attention_sample(
        queries=130, keys=131, heads=4, key_heads=2, bias=random_bias(130, 131)
    ),
    "bias with -inf": attention_sample(bias=half_infinite_bias(9, 11)),
    "bias of -inf alone": attention_sample(
        bias=lambda dtype: torch.full((1, 2, 1, 1), -math.inf, dtype=dtype)
    ),
    "mask (Sq, Sk)": attention_sample(bias=random_mask(9, 11)),
    "mask (B, 1, 1, Sk)": attention_sample(bias=random_mask(2, 1, 1, 11)),
    "mask with rows that see nothing": attention_sample(
        bias=random_mask(2, 2, 9, 11, blind=[0, 4, 8])
    ),
    "mask with rows that see nothing, causal": attention_sample(
        queries=70, keys=70, bias=random_mask(70, 70, blind=[1, 64]), is_causal=True
    ),
    "small, grouped heads and bias": attention_sample(
        **SMALL, heads=4, key_heads=2, value_dim=2, bias=random_bias(4, 1, 5), is_causal=True
    ),
    "small, mask with a row that sees nothing": attention_sample(
        **SMALL, bias=random_mask(2, 1, 3, 5, blind=[1])
    ),
    "small, row of -inf": attention_sample(**SMALL, bias=half_infinite_bias(3, 5), scale=0.7),
    # Few queries: the keys are split, and the results of the splits are merged.
    **{
        f"{queries} queries, {keys} keys": attention_sample(
            batch=1, queries=queries, keys=keys, heads=4, key_heads=2
        )
        for queries, keys in (*((1, keys) for keys in MANY_KEYS), (3, 1025))
    },
    "1 query, 1025 keys, mask of parts": attention_sample(
        queries=1, keys=1025, bias=mask_of_parts(1025)
    ),
    "1 query, 1025 keys, rising scores": rising_scores(1, 1025),
    "mask 0-d, True": attention_sample(bias=lambda dtype: torch.tensor(True)),
    "mask 0-d, False": attention_sample(bias=lambda dtype: torch.tensor(False)),
}

# All options at once, except a mask, for grouped heads.
ALL: dict[str, Any] = {
    "heads": 4,
    "key_heads": 2,
    "slopes": random_slopes(2, 4),
    "sinks": random_bias(4),
    "softcap": 3.0,
}

# Queries, keys, window_left, window_right.
WINDOWS = (
    *((11, 11, 3, -1), (11, 11, -1, 2), (11, 11, 2, 1), (11, 11, 0, 0), (11, 11, 100, 100)),
    *((7, 13, -1, 0), (13, 7, -1, 0), (7, 13, 2, 3), (13, 7, 2, 3), (13, 7, 0, -1), (3, 200, 5, 0)),
    *((200, 260, -1, 0), (260, 200, -1, 0), (300, 300, 10, 10), (300, 300, 0, 0)),
    *(
        (200, 200, 63, 0),
        (200, 200, 64, 0),
        (200, 200, 65, 0),
        (200, 200, 0, 63),
        (200, 200, 0, 64),
    ),
    *((97, 330, 95, 1), (96, 320, 0, 96), (190, 70, 20, 40), (1, 400, 100, 0), (400, 1, 50, 50)),
)

# Windows, softcap, ALiBi slopes and sinks.
OPTION_SAMPLES: dict[str, Callable[[torch.dtype], Sample]] = {
    # Windows around the sizes of tiles and blocks; whole tiles before and behind are not seen.
    **{
        f"window {left}, {right} of {queries} queries, {keys} keys": attention_sample(
            batch=1, queries=queries, keys=keys, window_left=left, window_right=right
        )
        for queries, keys, left, right in WINDOWS
    },
    **{
        f"window of {queries} queries, {keys} keys, causal": attention_sample(
            queries=queries, keys=keys, window_left=3, window_right=2, is_causal=True
        )
        for queries, keys in ((11, 11), (7, 13), (13, 7))
    },
    "window for grouped heads": attention_sample(
        heads=6, key_heads=2, queries=70, keys=140, window_left=30, window_right=0
    ),
    # With heads side by side in a block of queries, of which one tile of keys is seen by none.
    **{
        f"window {left} of {queries} queries, {keys} keys for grouped heads, causal": (
            attention_sample(
                heads=heads,
                key_heads=2,
                queries=queries,
                keys=keys,
                is_causal=True,
                window_left=left,
            )
        )
        for heads, queries, keys, left in ((4, 12, 25, 0), (8, 12, 25, 3), (8, 9, 75, 60))
    },
    "window, no keys": attention_sample(keys=0, window_right=0),
    "window, bias": attention_sample(
        queries=100, keys=230, bias=random_bias(2, 1, 100, 230), window_left=70, window_right=0
    ),
    "window, bias (1, H, 1, 1)": attention_sample(
        queries=100, keys=230, bias=random_bias(1, 2, 1, 1), window_left=10, window_right=20
    ),
    "window, mask with rows that see nothing": attention_sample(
        queries=100, keys=130, bias=random_mask(100, 130, blind=[0, 63, 99]), window_right=0
    ),
    "softcap": attention_sample(softcap=1.5),
    "softcap, causal": attention_sample(queries=70, keys=70, softcap=30.0, is_causal=True),
    "softcap, bias": attention_sample(bias=random_bias(2, 9, 11), softcap=1.0, scale=2.0),
    "softcap, mask": attention_sample(bias=random_mask(9, 11, blind=[3]), softcap=0.5),
    "softcap, large scores": large_scores_with_softcap,
    "slopes (H)": attention_sample(slopes=random_slopes(2)),
    "slopes (B, H)": attention_sample(slopes=random_slopes(2, 2)),
    "slopes in float32": attention_sample(slopes=random_slopes(2, 2, float32=True)),
    "slopes, more keys than queries, causal": attention_sample(
        queries=70, keys=150, slopes=random_slopes(2), window_right=0
    ),
    "slopes, more queries than keys": attention_sample(
        queries=150, keys=70, slopes=random_slopes(2, 2)
    ),
    "slopes for grouped heads": attention_sample(heads=6, key_heads=2, slopes=random_slopes(2, 6)),
    "sinks": attention_sample(sinks=random_bias(2)),
    "sinks (B, H)": attention_sample(sinks=random_bias(2, 2)),
    "sinks (B, H), 1 query, 2100 keys, grouped heads": attention_sample(
        queries=1, keys=2100, heads=6, key_heads=2, sinks=random_bias(2, 6)
    ),
    "sinks in float32": attention_sample(sinks=random_bias(2, float32=True)),
    "sinks above all scores": attention_sample(
        sinks=lambda dtype: torch.full((2,), 90, dtype=dtype)
    ),
    "sinks below all scores": attention_sample(
        sinks=lambda dtype: torch.full((2,), -math.inf, dtype=dtype)
    ),
    "sinks, no keys": attention_sample(keys=0, sinks=random_bias(2)),
    "sinks, rows that see nothing": attention_sample(
        bias=random_mask(2, 2, 9, 11, blind=[0, 4, 8]), sinks=random_bias(2)
    ),
    "sinks, rows before the first key": attention_sample(
        queries=150, keys=20, sinks=random_bias(2), window_right=0
    ),
    "sinks, large scores": large_scores_with_sinks,
    # Two key splits.
    "all options, 1 query, 2100 keys": attention_sample(
        **ALL, queries=1, keys=2100, bias=random_bias(4, 1, 2100), window_left=1900, window_right=0
    ),
    "all options": attention_sample(
        **ALL, bias=random_bias(4, 1, 11), is_causal=True, window_left=4, window_right=0
    ),
    "all options over several tiles": attention_sample(
        **ALL,
        queries=130,
        keys=200,
        head_dim=24,
        value_dim=40,
        bias=random_bias(2, 1, 130, 200),
        window_left=90,
        window_right=1,
    ),
    "all options over several tiles, causal": attention_sample(
        **ALL, queries=200, keys=130, bias=random_bias(200, 130), is_causal=True, window_left=10
    ),
    "all options, mask": attention_sample(
        **ALL, queries=100, keys=130, bias=random_mask(100, 130, blind=[0, 5]), window_left=70
    ),
    "small, all options": attention_sample(
        **SMALL, **ALL, value_dim=2, bias=random_bias(4, 1, 5), window_left=2, window_right=0
    ),
    "small, all options, mask": attention_sample(
        **(SMALL | {"queries": 6}),
        **ALL,
        bias=random_mask(2, 1, 6, 5, blind=[2]),
        is_causal=True,
        window_right=1,
    ),
}

ATTENTION = OpSpec(
    operator=torch.ops.foo.attention.default,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sizes=(),
    samples=PLAIN_SAMPLES | OPTION_SAMPLES,
    essential=(
        "small, grouped heads and bias",
        "small, all options",
        "small, all options, mask",
    ),
    in_layouts=(
        "small, grouped heads and bias",
        "small, all options",
        "all options over several tiles",
        "all options, 1 query, 2100 keys",
        "head dim 37",
        "head dim 64",
        "4 heads on 2, causal",
        "bias over several tiles",
        "bias in float32",
        "mask with rows that see nothing, causal",
    ),
    sized=lambda dtype, size: attention_sample(
        **ALL,
        queries=size,
        keys=size + 3,
        head_dim=8,
        value_dim=4,
        bias=random_bias(2, 1, 1, size + 3),
        is_causal=True,
        window_left=7,
        window_right=5,
    )(dtype),
    large=attention_sample(
        **ALL,
        queries=200,
        keys=230,
        bias=random_bias(2, 1, 200, 1),
        is_causal=True,
        window_left=150,
        window_right=0,
    ),
    reference=reference.attention,
    output_budget=output_budget,
    gradient_budget=gradient_budget,
)
