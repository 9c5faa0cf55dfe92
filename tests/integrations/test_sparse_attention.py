"""Attention to keys that a model's indexer has chosen, by a mask or by gathering them."""

import copy
import functools
import types

import pytest
import torch
from support.exact import assert_near
from support.model_zoo.checks import compare_gradients, compare_tokens, trio_of
from support.model_zoo.classes import classes_of
from support.model_zoo.models import inputs_of, make
from torch import nn

from foo_ops.integrations.transformers import attention, foo_attention_forward
from foo_ops.integrations.transformers.attention_layers import in_place_of_sdpa
from foo_ops.testing import reference

pytestmark = pytest.mark.usefixtures("one_thread")

KEYS = attention.FEWEST_KEYS
FEW = KEYS // (4 * attention.SHARE)
BATCH, HEADS = 2, 4


class Layer(nn.Module):
    is_causal = True


def tensors(queries, key_heads, dtype, keys=KEYS):
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, queries, 72), (key_heads, keys, 72), (key_heads, keys, 40))
    made = [torch.randn(BATCH, *it, generator=generator, dtype=torch.float64) for it in sizes]
    return [it.to(dtype).requires_grad_() for it in made]


def chosen(queries, count=FEW, keys=KEYS):
    """Return indices, of which some repeat and some are out of range."""
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(0, keys, (BATCH, queries, count), generator=generator)
    indices[..., 3] = indices[..., 5]
    indices[..., 0], indices[..., 1], indices[..., 2] = -1, keys, keys + 5
    return indices.int()


def shown(queries, keys=KEYS):
    """Return a causal mask with padding, and with a query that sees nothing."""
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries - 100)
    mask = mask.repeat(BATCH, 1, 1, 1)
    mask[1, ..., : keys // 3] = False
    mask[0, 0, 0] = False
    return mask


def both(indices, mask):
    """Return the mask restricted to the chosen keys, index by index."""
    seen = torch.zeros_like(mask)
    for row, rows in enumerate(indices.tolist()):
        for query, numbers in enumerate(rows):
            for it in numbers:
                if 0 <= it < mask.shape[-1]:
                    seen[row, 0, query, it] = mask[row, 0, query, it]
    return seen


def by_name(query, key, value, indices, mask, **options):
    return foo_attention_forward(Layer(), query, key, value, mask, indices=indices, **options)[0]


def applied(query, key, value, indices, mask, **options):
    """With the implementation sdpa, layers pass the choice in their mask."""
    mask = both(indices, mask)
    return in_place_of_sdpa(Layer(), query, key, value, mask, indices=None, **options)[0]


SINKS = torch.linspace(-1, 1, HEADS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "key_heads"), [(1, 1), (3, 4)])
@pytest.mark.parametrize(
    ("function", "options"),
    [(by_name, {}), (by_name, {"s_aux": SINKS, "softcap": 2.0, "scaling": 0.3}), (applied, {})],
    ids=["by name", "with options", "applied"],
)
def test_few_keys_are_gathered(function, options, queries, key_heads, dtype, attention_calls):
    given, indices, mask = tensors(queries, key_heads, dtype), chosen(queries), shown(queries)
    output = function(*given, indices, mask, **options)
    assert len(attention_calls) == BATCH * queries
    assert all(it[0] == 1 and it[1] < FEW and not it[2] for it in attention_calls)
    doubles = [it.detach().double().requires_grad_() for it in given]
    known = {"sinks": "s_aux", "softcap": "softcap", "scale": "scaling"}
    named = {name: options[it] for name, it in known.items() if it in options}
    sinks = named.pop("sinks", None)
    exact, _ = reference.attention(
        *doubles, both(indices, mask), None, None if sinks is None else sinks.double(), **named
    )
    exact = exact.transpose(1, 2)
    assert_near(output, exact.detach())
    assert output.is_contiguous()
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    gradients = torch.autograd.grad(output, given, weights)
    exact_gradients = torch.autograd.grad(exact, doubles, weights.double())
    for pair in zip(gradients, exact_gradients):
        assert_near(*pair, roundings=32)


@pytest.mark.parametrize("case", ["many", "float mask", "causal", "window", "few keys in all"])
def test_other_keys_are_hidden_by_a_mask(case, attention_calls):
    """Gathered keys have no positions, and many keys are read in place as quickly."""
    queries, keys = 3, KEYS // 2 if case == "few keys in all" else KEYS
    given = tensors(queries, 1, torch.float32, keys)
    indices = chosen(queries, KEYS // 4 if case == "many" else FEW, keys)
    mask, options, seen = shown(queries, keys), {}, both(indices, shown(queries, keys))
    if case == "float mask":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        seen = both(indices, torch.ones_like(seen))
        seen = torch.where(seen, mask.double(), -torch.inf)
    elif case in ("causal", "window"):
        window = 300 if case == "window" else keys
        mask, options = None, {"sliding_window": window if case == "window" else None}
        causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        causal &= ~causal.tril(-window + keys - queries)
        seen = both(indices, causal.repeat(BATCH, 1, 1, 1))
    output = by_name(*given, indices, mask, **options)
    assert attention_calls == [(queries, keys, True)]
    exact, _ = reference.attention(*(it.double() for it in given), seen)
    assert_near(output.detach(), exact.transpose(1, 2).detach())


@pytest.mark.parametrize("transform", ["compiled", "vmap"])
@pytest.mark.parametrize("function", [foo_attention_forward, in_place_of_sdpa])
def test_graphs_do_not_depend_on_the_choice(function, transform):
    given, indices, mask = tensors(2, 1, torch.float32), chosen(2), shown(2)
    given = [it.detach() for it in given]
    options = {"attention_mask": mask, "indices": indices}
    if function is in_place_of_sdpa:
        options = {"attention_mask": both(indices, mask), "indices": None}
    given.append(options.pop("attention_mask"))
    call = functools.partial(function, Layer(), **options)
    expected, _ = call(*given)
    if transform == "vmap":
        result = torch.vmap(lambda *it: call(*it)[0])(*(it[None] for it in given))[0]
    else:
        compiled = torch.compile(lambda *it: call(*it)[0], fullgraph=True, backend="eager")
        result = compiled(*given)
    torch.testing.assert_close(result, expected)


def test_few_hidden_keys_are_not_taken_for_few_shown(attention_calls):
    given, mask = tensors(1, 1, torch.float32), torch.zeros(BATCH, 1, 1, KEYS)
    mask[..., ::64] = torch.finfo(mask.dtype).min
    output, _ = in_place_of_sdpa(Layer(), *given, mask, indices=None)
    assert attention_calls == [(1, KEYS, True)]
    exact, _ = reference.attention(*(it.double() for it in given), mask.double())
    assert_near(output.detach(), exact.transpose(1, 2).detach())


def test_blocks_are_chosen_for_groups_of_heads():
    size, layer = 48, Layer()
    layer.indexer = types.SimpleNamespace(block_size=size)
    given, mask = tensors(3, 2, torch.float32), shown(3)
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(-1, KEYS // size + 1, (BATCH, 2, 3, 12), generator=generator)
    of_keys = torch.arange(KEYS) // size
    seen = (blocks[..., None] == of_keys).any(-2).repeat_interleave(HEADS // 2, 1) & mask
    output, _ = foo_attention_forward(layer, *given, mask, block_indices=blocks)
    exact, _ = reference.attention(*(it.double() for it in given), seen)
    assert_near(output.detach(), exact.transpose(1, 2).detach())


# ------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("name", ["deepseek_v32", "hy_v4", "minimax_m3_vl_text"])
@pytest.mark.parametrize("change", ["by name", "applied"])
def test_models(name, change, monkeypatch):
    """Also with sinks, and with blocks of keys; single keys are gathered in each call."""
    monkeypatch.setattr(attention, "FEWEST_KEYS", 1)
    monkeypatch.setattr(attention, "SHARE", 0)
    made = make(name, classes_of(name)[-1])
    trio, inputs = trio_of(made), inputs_of(made, "left")
    if change == "by name":
        by_name = copy.deepcopy(made.model)
        by_name.set_attn_implementation("foo")
        trio = trio._replace(ours=by_name)
    compare_gradients(trio, inputs, made.options)
    compare_tokens(trio, inputs, {})
