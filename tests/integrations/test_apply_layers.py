"""Decoder layers, in which `apply` adds the residual in the pass of the norm after it."""

import copy

import pytest
import torch
import transformers
from support.exact import assert_near
from support.transformer_models import GROUPED
from transformers.models.bert.modeling_bert import BertSelfOutput
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from foo_ops.integrations.transformers import apply, replaced
from foo_ops.integrations.transformers.norms import FooDecoderLayer, FooPostNormOutput

pytestmark = pytest.mark.usefixtures("one_thread")


class ScaledResidual(LlamaDecoderLayer):
    def forward(self, hidden_states, **others):
        return hidden_states + 2 * (super().forward(hidden_states, **others) - hidden_states)


class WithoutMask(LlamaDecoderLayer):
    def forward(self, hidden_states, attention_mask=None, **others):
        return super().forward(hidden_states, **others)


class WithRequired(LlamaDecoderLayer):
    def forward(self, hidden_states, attention_mask, **others):
        return super().forward(hidden_states, attention_mask, **others)


@pytest.mark.parametrize("kind", [ScaledResidual, WithoutMask, WithRequired])
def test_other_decoder_layers_stay(kind):
    config = transformers.LlamaConfig(**GROUPED)
    assert not isinstance(apply(kind(config, 0)), FooDecoderLayer)
    assert isinstance(apply(LlamaDecoderLayer(config, 0)), FooDecoderLayer)


def layer_and_call():
    """Return a layer, and its arguments by position."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**GROUPED, attn_implementation="eager")
    mask = torch.zeros(2, 1, 5, 5)
    mask[..., 2] = -9
    angles = torch.randn(1, 5, 4).repeat(1, 1, 2)
    tables = angles.cos(), angles.sin()
    call = (torch.randn(2, 5, 48), mask, None, None, False, tables)
    return LlamaDecoderLayer(config, 0), call


def test_arguments_by_position():
    layer, call = layer_and_call()
    ours = apply(copy.deepcopy(layer))
    torch.testing.assert_close(ours(*call), layer(*call))
    with pytest.raises(TypeError) as caught:
        ours(*call, "one more")
    assert str(caught.value) == "forward() takes 6 positional arguments, got 7"


def sums_of(layer, call, monkeypatch):
    """Return the number of sums computed together with a norm, and the layer's result."""
    operator, calls = torch.ops.foo.add_rms_norm.default, []

    def spy(*arguments, **keywords):
        calls.append(arguments)
        return operator(*arguments, **keywords)

    monkeypatch.setattr(torch.ops.foo.add_rms_norm, "default", spy)
    result = layer(*call)
    monkeypatch.undo()
    return len(calls), result


def test_one_pass_for_sum_and_norm(monkeypatch):
    layer, call = layer_and_call()
    expected = layer(*call)
    count, result = sums_of(apply(layer), call, monkeypatch)
    assert count == 1
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("change", ["hook", "other dtype"])
def test_two_passes_where_one_is_not_enough(change, monkeypatch):
    """Hooks of the norm, and sums of two dtypes."""
    layer, call = layer_and_call()
    apply(layer)
    if change == "hook":
        layer.post_attention_layernorm.register_forward_hook(lambda *arguments: 2 * arguments[2])
    else:
        hidden, *others = call
        call = (hidden.double(), *others)
        layer.input_layernorm.register_forward_hook(lambda *arguments: arguments[2].float())
        layer.mlp.register_forward_pre_hook(lambda module, arguments: arguments[0].float())
    count, result = sums_of(layer, call, monkeypatch)
    assert count == 0
    assert result.dtype == call[0].dtype


# ------------------------------------------------------------------------- ends of BERT's blocks


class WithoutResidual(BertSelfOutput):
    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)))


class WithSumFirst(BertSelfOutput):
    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states) + input_tensor))


BERT = transformers.BertConfig(hidden_size=16, num_attention_heads=2, intermediate_size=8)


@pytest.mark.parametrize("kind", [WithoutResidual, WithSumFirst])
def test_other_outputs_stay(kind):
    assert not isinstance(apply(kind(BERT)), FooPostNormOutput)
    assert isinstance(apply(BertSelfOutput(BERT)), FooPostNormOutput)


@pytest.mark.parametrize("layer_norm", [True, False])
def test_one_pass_for_sum_and_layer_norm(layer_norm, monkeypatch):
    output, (hidden, residual) = BertSelfOutput(BERT).eval(), torch.randn(2, 3, 5, 16)
    expected = copy.deepcopy(output).double()(hidden.double(), residual.double())
    operator, calls = torch.ops.foo.add_layer_norm.default, []
    operator(hidden, residual)  # the first call looks the operator up

    def spy(*arguments, **keywords):
        calls.append(arguments)
        return operator(*arguments, **keywords)

    monkeypatch.setattr(torch.ops.foo.add_layer_norm, "default", spy)
    found = apply(output, layer_norm=layer_norm)(hidden, residual)
    assert len(calls) == layer_norm
    assert replaced(output).get("layer_norm", 0) == layer_norm
    assert_near(found.detach(), expected.detach())


NORMS = (torch.nn.LayerNorm, CohereLayerNorm, NemotronLayerNorm1P)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norms_under_autocast_have_their_own_dtype(norm, dtype, device):
    """Autocast on foo computes torch's layer norm in float32; on CPUs it leaves it alone."""
    module, input = norm(16).to(device), torch.randn(3, 16, device=device, dtype=dtype)
    for parameters in (torch.float32, dtype):
        own = module.to(parameters)
        with torch.autocast(device, torch.bfloat16):
            assert apply(copy.deepcopy(own))(input).dtype == own(input).dtype


def test_sums_under_autocast_have_the_dtype_of_their_terms(device):
    output = BertSelfOutput(BERT).eval().to(device)
    inputs = torch.randn(2, 3, 5, 16, device=device)
    ours = apply(copy.deepcopy(output))
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(device, torch.bfloat16):
            results = [it.to(dtype)(*inputs.to(dtype)) for it in (ours, output)]
        assert results[0].dtype == results[1].dtype
