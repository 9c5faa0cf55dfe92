"""foo::attention and foo::attention_varlen agree with the reference for random arguments."""

import hypothesis
import pytest
import torch
from hypothesis import strategies

from foo_ops import testing
from foo_ops.testing import ATTENTION, ATTENTION_VARLEN, LAYOUTS
from foo_ops.testing.arguments import expanded
from foo_ops.testing.specs.attention import (
    attention_sample,
    half_infinite_bias,
    random_bias,
    random_mask,
    random_slopes,
)
from foo_ops.testing.specs.attention_varlen import Pages, varlen_sample

pytestmark = pytest.mark.usefixtures("one_thread")


def examples(count):
    """Return settings that draw the same examples in each run."""
    return hypothesis.settings(max_examples=count, deadline=None, derandomize=True, database=None)


integers, sampled = strategies.integers, strategies.sampled_from
booleans = strategies.booleans()
dtypes, devices = sampled(ATTENTION.dtypes), sampled(["cpu", "foo"])
# Sizes around those of tiles, blocks of queries, and key splits.
lengths = integers(0, 20) | integers(60, 70) | integers(94, 98) | sampled([127, 130, 200])
many_keys = sampled([500, 1023, 1024, 1025, 1100, 2100])
windows = sampled([-1, -1, 0, 1, 63, 64]) | integers(0, 200)


@strategies.composite
def options(draw, heads, batch):
    """Draw the keywords, and makers of slopes and sinks."""
    drawn = {"window_left": draw(windows), "window_right": draw(windows)}
    if draw(booleans):
        drawn["softcap"] = draw(sampled([0.5, 2.0, 30.0]))
    if draw(booleans):
        drawn["scale"] = draw(sampled([0.0, 1.0, -0.3]))
    if draw(booleans):
        shape = draw(sampled([(heads,), (batch, heads)]))
        drawn["slopes"] = random_slopes(*shape, float32=draw(booleans))
    if draw(booleans):
        drawn["sinks"] = random_bias(heads, float32=draw(booleans))
    return drawn


@strategies.composite
def biases(draw, batch, heads, queries, keys):
    """Draw None, or a bias or a mask of a shape that broadcasts."""
    full = (batch, heads, queries, keys)
    shape = [size if draw(booleans) else 1 for size in full[4 - draw(integers(2, 4)) :]]
    make = draw(sampled([None, random_bias, random_mask, half_infinite_bias]))
    return None if make is None or 0 in shape else make(*shape)


@strategies.composite
def in_layouts(draw, sample):
    """Return the sample with each tensor in a layout of its own."""
    return sample.map(lambda tensor: draw(layouts_of(tensor))(tensor))


def layouts_of(tensor):
    """Draw layouts; block numbers are not repeated, since there may be too few blocks."""
    integer = not tensor.is_floating_point() and tensor.dtype != torch.bool
    layouts = [layout for layout in LAYOUTS if not (integer and layout is expanded)]
    return sampled([torch.clone, *layouts])


@strategies.composite
def attention_calls(draw):
    batch, key_heads = draw(integers(1, 3)), draw(integers(1, 3))
    heads = key_heads * draw(integers(1, 3))
    queries, keys = draw(lengths), draw(lengths)
    if draw(integers(0, 7)) == 0:
        batch, queries, keys = 1, draw(integers(1, 3)), draw(many_keys)
    make = attention_sample(
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        queries=queries,
        keys=keys,
        head_dim=draw(integers(1, 40)),
        value_dim=draw(integers(1, 40)),
        bias=draw(biases(batch, heads, queries, keys)),
        is_causal=draw(booleans),
        **draw(options(heads, batch)),
    )
    dtype = draw(dtypes)
    return dtype, draw(in_layouts(make(dtype)))


@strategies.composite
def varlen_calls(draw):
    key_heads = draw(integers(1, 2))
    heads = key_heads * draw(integers(1, 3))
    sizes = draw(strategies.lists(strategies.tuples(lengths, lengths), min_size=1, max_size=4))
    used = [draw(integers(0, keys)) for _, keys in sizes] if draw(booleans) else None
    pages = Pages(draw(sampled([1, 3, 16, 64, 100]))) if draw(booleans) else None
    make = varlen_sample(
        sizes,
        heads=heads,
        key_heads=key_heads,
        head_dim=draw(integers(1, 40)),
        value_dim=draw(integers(1, 40)),
        used=used,
        pages=pages,
        **draw(options(heads, len(sizes))),
    )
    dtype = draw(dtypes)
    return dtype, draw(in_layouts(make(dtype)))


def check(spec, drawn, device_type):
    dtype, sample = drawn
    sample = sample.to(device_type).requiring_grad()
    outputs = sample.call(spec.operator)
    testing.check_outputs(spec, sample, dtype, outputs)
    cotangents = testing.cotangents_for(outputs)
    gradients = torch.autograd.grad(outputs, sample.differentiable(), cotangents)
    testing.check_gradients(spec, sample, gradients, cotangents)


@examples(200)
@hypothesis.given(drawn=attention_calls(), device_type=devices)
def test_attention(drawn, device_type):
    check(ATTENTION, drawn, device_type)


@examples(100)
@hypothesis.given(drawn=varlen_calls(), device_type=devices)
def test_attention_varlen(drawn, device_type):
    check(ATTENTION_VARLEN, drawn, device_type)
