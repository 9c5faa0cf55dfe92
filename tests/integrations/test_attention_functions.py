"""Replacements of transformers' attention functions compute the same."""

import inspect
import math
import types

import pytest
import torch
import transformers
from support.transformer_models import (
    GROUPED,
)
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mt5 import modeling_mt5

from foo_ops.integrations.transformers import apply, foo_attention_forward, left_alone, replaced
from foo_ops.integrations.transformers.attention_layers import (
    form_of,
    in_place_of_sdpa,
    known_eager,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# ----------------------------------------------------------------------- what stands for sdpa


class Layer(nn.Module):
    is_causal = True
    layer_idx = 0
    num_key_value_groups = 2


def call(function, *, queries=5, keys=7, mask=None, dtype=torch.float32, layer=None, **options):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, queries, 8, generator=generator).to(dtype)
    key, value = torch.randn(2, 2, 2, keys, 8, generator=generator).to(dtype).unbind()
    return function(Layer() if layer is None else layer, query, key, value, mask, **options)


MASKS = {
    "none": None,
    "bool": torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.7,
    "float": torch.randn(1, 4, 5, 7, generator=torch.Generator().manual_seed(1)),
}
BIAS = torch.randn(1, 4, 5, 7, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": False}, {"is_causal": True, "scaling": 0.3}, {"position_bias": BIAS}],
    ids=["layer", "not causal", "causal", "bias"],
)
def test_sdpa(mask, options, attention_calls):
    """Also with more keys than queries: the first keys are seen."""
    ours, weights = call(in_place_of_sdpa, mask=MASKS[mask], **options)
    assert len(attention_calls) == 1
    assert weights is None
    theirs, _ = call(sdpa_attention_forward, mask=MASKS[mask], **options)
    torch.testing.assert_close(ours, theirs)
    assert ours.is_contiguous()


def test_one_query_of_sdpa_sees_all_keys():
    ours, _ = call(in_place_of_sdpa, queries=1, is_causal=True)
    torch.testing.assert_close(ours, call(sdpa_attention_forward, queries=1, is_causal=True)[0])


def test_what_sdpa_ignores_is_ignored(attention_calls):
    """Models pass windows and key indices in addition to the mask, which includes them."""
    options = {"sliding_window": 2, "indices": torch.zeros(2, 5, 1, dtype=torch.int32)}
    ours, _ = call(in_place_of_sdpa, **options, s_aux=torch.ones(4), anything=1)
    assert len(attention_calls) == 1
    torch.testing.assert_close(ours, call(sdpa_attention_forward)[0])


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"output_attentions": True}])
def test_what_sdpa_reads_goes_to_it(options, attention_calls):
    results = []
    for function in (sdpa_attention_forward, in_place_of_sdpa):
        try:
            results.append(call(function, **options)[0])
        except ValueError as error:
            results.append(torch.tensor(list(str(error).encode())))
    assert attention_calls == []
    assert torch.equal(*results)


def test_what_foo_does_not_take_goes_to_sdpa(attention_calls):
    """Three-dimensional tensors go to sdpa, and complex and integer ones raise its errors."""
    for dtype in (torch.complex64, torch.int64):
        errors = []
        for function in (sdpa_attention_forward, in_place_of_sdpa):
            with pytest.raises((RuntimeError, NotImplementedError, TypeError)) as caught:
                call(function, dtype=dtype)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]
    assert attention_calls == []


def test_what_autocast_does_not_convert_goes_to_sdpa(attention_calls):
    query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
    for function in (sdpa_attention_forward, in_place_of_sdpa):
        with torch.autocast("cpu"), pytest.raises(RuntimeError, match="same dtype"):
            function(Layer(), query.double(), key, value, None)
    assert attention_calls == []
    with torch.autocast("cpu"):
        result, _ = in_place_of_sdpa(Layer(), query.half(), key, value, None)
    assert result.dtype == torch.bfloat16
    assert len(attention_calls) == 1


# ------------------------------------------------------------------------ what stands for eager


EAGER = {
    "Llama": modeling_llama.eager_attention_forward,
    "Gemma 2, softcap": modeling_gemma2.eager_attention_forward,
    "gpt-oss, sinks": modeling_gpt_oss.eager_attention_forward,
    "mT5, position bias": modeling_mt5.eager_attention_forward,
}


def options_of(name):
    options = {"scaling": 0.3, "dropout": 0.0}
    return options | {
        "Gemma 2, softcap": {"softcap": 1.5},
        "mT5, position bias": {"position_bias": BIAS},
    }.get(name, {})


@pytest.mark.parametrize("mask", ["none", "float"])
@pytest.mark.parametrize("name", EAGER)
def test_eager(name, mask, attention_calls):
    own = EAGER[name]
    layer, options = Layer().eval(), options_of(name)
    layer.sinks = nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(4)))
    if name.startswith("mT5"):
        layer.num_key_value_groups = 1
    ours = known_eager(own)
    attention_calls.clear()
    generator = torch.Generator().manual_seed(0)
    heads = 4 // layer.num_key_value_groups
    query = torch.randn(2, 4, 5, 8, generator=generator)
    key, value = torch.randn(2, 2, heads, 7, 8, generator=generator).unbind()
    result, weights = ours(layer, query, key, value, MASKS[mask], **options)
    assert weights is None
    assert len(attention_calls) == 1
    theirs, _ = own(layer, query, key, value, MASKS[mask], **options)
    torch.testing.assert_close(result, theirs)


TWISTS = {
    "another scale": ("* scaling", "* scaling * 2"),
    "no mask": ("attn_weights + attention_mask", "attn_weights"),
    "half of the mask": ("attn_weights + attention_mask", "attn_weights + attention_mask / 2"),
    "another softmax": ("dim=-1, dtype", "dim=-2, dtype"),
    "a bound": ("* scaling", "* scaling).clamp(-0.1, 0.1"),
    "dropout in eval": ("training=module.training", "training=True"),
    "the causality of the layer": ("* scaling", "* scaling * (1 + module.is_causal)"),
    "a keyword": ("* scaling", "* scaling * (2 if kwargs.get('is_causal') else 1)"),
    "an attribute": ("* scaling", "* scaling * module.temperature"),
    "the values": ("(attn_weights, value_states)", "(attn_weights, value_states.flip(2))"),
}


def twisted(own, other, module=modeling_llama):
    source = inspect.getsource(module.eager_attention_forward)
    assert own in source
    if other.endswith("0.1"):
        own, other = (
            "torch.matmul(query, key_states.transpose(2, 3)) * scaling",
            ("(torch.matmul(query, key_states.transpose(2, 3)) * scaling).clamp(-0.1, 0.1)"),
        )
    names = dict(vars(module))
    exec(source.replace(own, other), names)
    return names["eager_attention_forward"]


@pytest.mark.parametrize("twist", TWISTS)
def test_other_eager_functions_stay(twist):
    assert known_eager(twisted(*TWISTS[twist])) is None


def test_other_functions_with_a_soft_cap_stay():
    other = twisted("torch.tanh(attn_weights)", "torch.atan(attn_weights)", modeling_gemma2)
    assert known_eager(other) is None


def test_layers_of_a_module_with_another_eager_function_are_left_alone(monkeypatch):
    other = twisted(*TWISTS["another scale"])
    names = dict(vars(modeling_llama)) | {"eager_attention_forward": other}
    own = modeling_llama.LlamaAttention.forward
    forward = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__)
    kind = type("OtherAttention", (modeling_llama.LlamaAttention,), {"forward": forward})
    config = transformers.LlamaConfig(**GROUPED, attn_implementation="eager")
    layer = apply(nn.ModuleDict({"self_attn": kind(config, 0)}))
    assert replaced(layer) == {"rotary_embedding": 1, "linear": 4}
    assert left_alone(layer) == {
        "self_attn": "its eager_attention_forward does not compute what foo::attention does"
    }


@pytest.mark.parametrize(
    "options",
    [
        {"output_attentions": True, "scaling": 0.3},
        {"softcap": 2.0, "unknown": 1, "scaling": 0.3},
        {"scaling": None},
    ],
    ids=["weights", "unknown", "no scale"],
)
def test_what_is_not_known_of_eager_goes_to_the_own_function(options, attention_calls):
    calls = []

    def eager_attention_forward(
        module, query, key, value, attention_mask, scaling=None, dropout=0.0, unknown=None, **kwargs
    ):
        calls.append((scaling, unknown, kwargs))
        own = modeling_gemma2.eager_attention_forward
        return own(module, query, key, value, attention_mask, dropout, scaling, **kwargs)

    known = known_eager(eager_attention_forward)
    calls.clear()
    attention_calls.clear()
    layer = Layer().eval()
    layer.head_dim = 8
    result, weights = call(known, layer=layer, **options)
    assert len(calls) == 1
    assert attention_calls == []
    assert weights is not None
    others = {name: it for name, it in options.items() if name not in ("scaling", "unknown")}
    assert calls[0] == (options["scaling"], options.get("unknown"), others)
    assert result.shape == (2, 5, 4, 8)


# ---------------------------------------------------------------- implementation "foo" by its name


@pytest.mark.parametrize(
    ("option", "came"),
    [
        ({"key_bias": torch.zeros(1)}, "key_bias must be None, since this option is unknown "
         "and may change the result, got Tensor"),
        ({"block_indices": torch.zeros(1)}, "block_indices must be None if the layer has no "
         "indexer.block_size, got Tensor"),
        ({"rotate": 3}, "rotate must be None, since this option is unknown and may change the "
         "result, got int"),
    ],
)  # fmt: skip
def test_unknown_keywords_are_refused(option, came):
    with pytest.raises(NotImplementedError) as caught:
        call(foo_attention_forward, **option)
    assert str(caught.value) == f"attention of implementation 'foo': {came}"


def test_keywords_that_change_nothing():
    expected, _ = call(foo_attention_forward)
    tokens = torch.arange(5)
    options = {"position_ids": tokens, "input_ids": tokens[None], "use_cache": True}
    options["deterministic"] = True
    assert torch.equal(call(foo_attention_forward, **options, anything=None)[0], expected)


def test_indices_choose_keys():
    indices = torch.tensor([[5, 2, 4, -1], [1, 1, 6, 3]])[:, None].expand(2, 5, 4)
    seen = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    for row, chosen in enumerate(([5, 2, 4], [1, 6, 3])):
        seen[row, :, :, chosen] = True
    for mask in (None, MASKS["bool"], MASKS["float"]):
        if mask is MASKS["float"]:
            shown = mask.masked_fill(~seen, -math.inf)
        else:
            shown = seen if mask is None else mask & seen
        result, _ = call(foo_attention_forward, mask=mask, indices=indices.int(), is_causal=False)
        expected, _ = call(foo_attention_forward, mask=shown, is_causal=False)
        torch.testing.assert_close(result, expected)


# --------------------------------------------------------------------------------------- rotations


def test_arguments_of_a_rotation_may_be_left_out():
    """Some functions rotate a query alone, with another default for the heads' dimension."""
    own = modeling_llama.apply_rotary_pos_emb

    def apply_rotary_pos_emb(q, k=None, cos=None, sin=None, unsqueeze_dim=2):
        both = own(q, q if k is None else k, cos, sin, unsqueeze_dim)
        return both[0] if k is None else both

    rotate, generator = form_of(apply_rotary_pos_emb).rotate, torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 5, 3, 8, generator=generator).unbind()
    tables = torch.randn(2, 2, 5, 4, generator=generator).repeat(1, 1, 1, 2).unbind()
    cosine, sine = tables
    alone = rotate(query, cos=cosine, sin=sine)
    assert torch.equal(alone, apply_rotary_pos_emb(query, cos=cosine, sin=sine))
    results = rotate(query, key, *tables), apply_rotary_pos_emb(query, key, *tables)
    torch.testing.assert_close(*results)


def test_tables_with_two_sets_of_angles_are_turned_by_the_models_function():
    """As for images whose positions have several axes."""
    own = modeling_llama.apply_rotary_pos_emb
    rotate, generator = form_of(own).rotate, torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 2, 5, 8, generator=generator).unbind()
    cosine, sine = torch.randn(2, 2, 5, 8, generator=generator).unbind()
    one, two = (
        [torch.randn(2, 5, width, generator=generator).repeat(1, 1, 8 // width) for _ in range(2)]
        for width in (4, 8)
    )
    turned = (query.transpose(1, 2), key.transpose(1, 2))
    layouts = [((query, key), 1), (turned, 2)]
    # The same tables, overwritten with one set of angles and with two again, for heads before and
    # behind the positions; the last tables were read for the next position of the heads.
    for angles in (one, two, one):
        cosine.copy_(angles[0])
        sine.copy_(angles[1])
        layouts.reverse()
        for given, heads in layouts:
            results = (it(*given, cosine, sine, unsqueeze_dim=heads) for it in (rotate, own))
            torch.testing.assert_close(*results)
