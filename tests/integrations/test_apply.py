"""Modules that `apply` leaves alone or must not mistake for others, and the way back."""

import copy
import io
import pickle

import pytest
import torch
import transformers
from support.transformer_models import GROUPED, SIZES, build, decoder, tokens
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.t5.modeling_t5 import T5LayerNorm

from foo_ops.integrations.transformers import apply, replaced, restore
from foo_ops.integrations.transformers.replacement import Replacement

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = "llama"


def logits(model):
    with torch.no_grad():
        return model(tokens(2, 9).to(model.device)).logits.cpu()


def classes(model):
    return {name: type(module) for name, module in model.named_modules()}


# ------------------------------------------------------------------------------ what stays as it is


def test_parameters_stay():
    model = decoder(LLAMA)
    parameters = dict(model.named_parameters())
    state = model.state_dict()
    assert apply(model) is model
    assert all(parameters[name] is it for name, it in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    assert not any(name for name, _ in model.named_buffers() if name in state)


METHODS = {"forward", "train", "_apply", "_load_from_state_dict"}
"""Methods of torch.nn.Module that replacements override; each calls the original."""


def test_replacements_hide_no_attribute_of_modules():
    waiting, hidden = [Replacement], {}
    while waiting:
        kind = waiting.pop()
        # Subclasses that are modules, too, are made by replacing one.
        waiting += [it for it in kind.__subclasses__() if not issubclass(it, nn.Module)]
        own = (name for it in kind.__mro__ if it is not object for name in vars(it))
        public = {name for name in own if not name.startswith("__")}
        hidden[kind.__name__] = public & set(dir(nn.Module)) - METHODS
    assert {name: it for name, it in hidden.items() if it} == {}


@pytest.mark.parametrize("config", [transformers.LlamaConfig, transformers.BertConfig])
def test_parts_have_the_methods_of_modules(config):
    model = transformers.AutoModel.from_config(config(**SIZES))
    expected = [[k for k, _ in it.named_parameters()] for it in model.modules()]
    ours = apply(model).modules()
    assert [[k for k, _ in it.named_parameters()] for it in ours] == expected
    assert all(list(it.parameters()) or not it._parameters for it in model.modules())


def test_classes_stay():
    model = decoder(LLAMA)
    before = {name: type(it) for name, it in model.named_modules()}
    apply(model)
    for name, module in model.named_modules():
        assert isinstance(module, before[name])
        for attribute in ("__name__", "__qualname__", "__module__"):
            assert getattr(type(module), attribute) == getattr(before[name], attribute)
    assert repr(model) == repr(decoder(LLAMA))


def test_stored_models_are_equal(tmp_path):
    model = build(transformers.AutoModelForCausalLM, lambda: transformers.LlamaConfig(
        **GROUPED, tie_word_embeddings=True))  # fmt: skip
    model.save_pretrained(tmp_path / "before")
    apply(model).save_pretrained(tmp_path / "after")
    names = sorted(it.name for it in (tmp_path / "before").iterdir())
    assert names == sorted(it.name for it in (tmp_path / "after").iterdir())
    for name in names:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    assert not replaced(loaded)
    torch.testing.assert_close(logits(apply(loaded)), logits(model))


def test_tied_weights_stay_tied():
    config = transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True)
    model = apply(transformers.LlamaForCausalLM(config))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
@pytest.mark.parametrize("name", [LLAMA, "Gemma", "Phi3", "GPT2"])
def test_copies_are_applied_and_independent(name, how):
    model = apply(decoder(name))
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert replaced(twin) == replaced(model)
    assert classes(twin) == classes(model)
    expected = logits(model)
    assert torch.equal(logits(twin), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(logits(model), expected)
    assert replaced(restore(twin)) == {}
    assert replaced(model)


def test_hooks_are_called():
    model, calls = decoder(LLAMA), []
    layer = model.model.layers[0]
    for module in (layer.input_layernorm, layer.mlp, layer.mlp.up_proj, layer.self_attn):
        module.register_forward_hook(lambda module, *_: calls.append(module))
    logits(apply(model))
    assert len(calls) == 4


def test_moves_to_foo():
    model = apply(decoder(LLAMA))
    expected = logits(model)
    torch.testing.assert_close(logits(model.to("foo")), expected)


def test_twice_is_once():
    model = apply(decoder(LLAMA))
    before = classes(model), replaced(model)
    apply(model)
    assert (classes(model), replaced(model)) == before
    assert replaced(restore(model)) == {}


def test_layers_that_are_wrapped_later():
    """Adapters keep a linear layer and add to its result (LoRA)."""

    class Adapter(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer = layer
            self.down = nn.Linear(layer.in_features, 2, bias=False)
            self.up = nn.Linear(2, layer.out_features, bias=False)

        def forward(self, x):
            return self.base_layer(x) + self.up(self.down(x))

    results = []
    for change in (apply, restore):
        model = change(decoder(LLAMA)).requires_grad_(False)
        torch.manual_seed(0)
        for layer in model.model.layers:
            layer.mlp.gate_proj = Adapter(layer.mlp.gate_proj)
            layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        model(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
        results.append({k: it.grad for k, it in model.named_parameters() if it.requires_grad})
    assert len(results[0]) == 8
    torch.testing.assert_close(*results)


def test_parametrized_layers_stay_applied():
    layer = apply(nn.Sequential(nn.Linear(3, 3)))[0]
    nn.utils.parametrizations.weight_norm(layer)
    x = torch.randn(2, 3)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    norm = apply(nn.Sequential(nn.RMSNorm(3, eps=1e-6)))[0]
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Tanh())
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (3,), norm.weight, norm.eps))


MODULES = ["attention", "rms_norm", "rotary_embedding", "mlp", "linear"]
FLAGS = [*MODULES, "fused_loss", "loss", "cache", "decode"]
ALSO = {"fused_loss": {"linear": 1}}
"""Other modules that a flag also replaces."""


@pytest.mark.parametrize("flag", FLAGS)
def test_each_part_by_itself(flag):
    model, off = decoder(LLAMA), dict.fromkeys(FLAGS, False)
    everything = replaced(apply(copy.deepcopy(model)))
    assert list(everything) == FLAGS
    one = apply(copy.deepcopy(model), **{**off, flag: True})
    assert replaced(one) == {flag: everything[flag], **ALSO.get(flag, {})}
    torch.testing.assert_close(logits(one), logits(model), rtol=1e-4, atol=1e-4)
    # The other kinds can follow.
    assert replaced(apply(one)) == everything


def test_only_modules_are_taken():
    with pytest.raises(TypeError) as caught:
        apply("gpt2")
    assert str(caught.value) == "apply: model must be a torch.nn.Module, got str"


# ----------------------------------------------------------------------------------- the way back


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "foo"])
@pytest.mark.parametrize("name", [LLAMA, "Gemma", "GPT2"])
def test_restored_model_is_what_it_was(name, implementation):
    model = decoder(name)
    model.set_attn_implementation(implementation)
    expected, before = logits(model), classes(model)
    loss = model.loss_function
    attributes = {key: set(vars(it)) for key, it in model.named_modules()}
    assert restore(apply(model)) is model
    assert replaced(model) == {}
    assert classes(model) == before
    assert model.config._attn_implementation == implementation
    assert model.loss_function is loss
    assert {key: set(vars(it)) for key, it in model.named_modules()} == attributes
    assert torch.equal(logits(model), expected)


def test_a_loss_of_the_users_own_stays():
    model = decoder(LLAMA)
    model.loss_function = lambda logits, labels, **others: logits.sum()
    own = model.loss_function
    assert "loss" not in replaced(apply(model))
    assert restore(model).loss_function is own


# -------------------------------------------------------------------- what is taken for what it is


class HalvedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) / 2


class EpsOutsideRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        norm = hidden_states.pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * hidden_states / (norm + self.variance_epsilon)


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states)


class BiasedRMSNorm(LlamaRMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden_states):
        return super().forward(hidden_states) + self.bias


class FlooredRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states).clamp(max=1)


class SampleLayerNorm(nn.LayerNorm):
    """Divides by one less than the number of elements."""

    def forward(self, input):
        variance, mean = torch.var_mean(input, -1, keepdim=True)
        return (input - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class BiasFirstLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return nn.functional.layer_norm(input + self.bias, input.shape[-1:], self.weight)


class WideLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input.float())


OTHER_NORMS = [
    HalvedRMSNorm,
    EpsOutsideRMSNorm,
    GatedRMSNorm,
    BiasedRMSNorm,
    FlooredRMSNorm,
    SampleLayerNorm,
    BiasFirstLayerNorm,
    WideLayerNorm,
    lambda size: nn.LayerNorm((2, size)),
    lambda size: nn.LayerNorm(size, elementwise_affine=False),
]


@pytest.mark.parametrize("norm", OTHER_NORMS)
def test_other_norms_stay(norm):
    assert replaced(apply(norm(32))) == {}


NORMS = dict.fromkeys([LlamaRMSNorm, GemmaRMSNorm, T5LayerNorm], "rms_norm")
NORMS |= dict.fromkeys([nn.LayerNorm, CohereLayerNorm, DebertaLayerNorm], "layer_norm")
NORMS[NemotronLayerNorm1P] = "layer_norm"


@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_known_on_any_weights(norm):
    """Also where all weights are 0 or 1, as in new models, and on other devices."""
    for weight in (0.0, 1.0):
        for device in ("cpu", "foo", "meta"):
            module = norm(32).to(device)
            nn.init.constant_(module.weight, weight)
            assert replaced(apply(module)) == {NORMS[norm]: 1}


def llama_mlp(forward=None, activation="silu", **attributes):
    config = transformers.LlamaConfig(**{**GROUPED, "hidden_act": activation})
    base = LlamaMLP if forward is None else type("MLP", (LlamaMLP,), {"forward": forward})
    module = base(config).eval()
    for name, it in attributes.items():
        setattr(module, name, it)
    return module


def bounded(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x))


def dropped(self, x):
    return nn.functional.dropout(LlamaMLP.forward(self, x), 0.5, self.training)


@pytest.mark.parametrize(
    "mlp",
    [
        llama_mlp(activation="quick_gelu"),
        llama_mlp(activation="gelu_10"),
        llama_mlp(bounded),
        llama_mlp(dropped),
        llama_mlp(norm=nn.Identity()),
        llama_mlp(scale=nn.Parameter(torch.ones(1))),
    ],
    ids=["quick", "clipped", "bounded", "dropout", "another layer", "a parameter"],
)
def test_other_mlps_stay(mlp):
    assert replaced(apply(mlp)) == {"linear": 3}
    assert replaced(apply(llama_mlp()))["mlp"] == 1


@pytest.mark.parametrize("name", ["llama", "cohere", "glm", "gpt_oss"])
def test_another_rotation_stays(name, monkeypatch):
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["models"])
    attention = next(
        it for key, it in vars(module).items() if key.endswith("Attention") and "config" in
        it.__init__.__code__.co_varnames
    )  # fmt: skip
    own = module.apply_rotary_pos_emb

    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        return own(q, k, cos, -sin, unsqueeze_dim)

    layer = attention.__new__(attention)
    nn.Module.__init__(layer)
    assert replaced(apply(layer)) == {"attention": 1, "rotary_embedding": 1}
    restore(layer)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", rotate)
    assert replaced(apply(layer)) == {"attention": 1}


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_other_linear_layers_stay():
    wrapped = nn.Linear(2, 2)
    wrapped.forward = lambda input: input
    layers = [Scaled(2, 2), wrapped, nn.Linear(2, 2, dtype=torch.complex64), nn.Bilinear(2, 2, 2)]
    assert replaced(apply(nn.Sequential(*layers))) == {}


def test_weights_of_quantisers_keep_their_products():
    """A tensor subclass that replaces a weight later brings its own products."""

    class Quantised(torch.Tensor):
        pass

    layer = apply(nn.Sequential(nn.Linear(3, 2)))[0]
    layer.weight = nn.Parameter(torch.randn(2, 3).as_subclass(Quantised), requires_grad=False)
    assert isinstance(layer(torch.randn(1, 3)), Quantised)


def test_one_class_has_the_rotation_of_its_module():
    """The function that attention layers call is ours in the applied model only."""
    model, other = apply(decoder(LLAMA)), decoder(LLAMA)
    assert type(other.model.layers[0].self_attn) is LlamaAttention
    ours = type(model.model.layers[0].self_attn).own_forward.__globals__["apply_rotary_pos_emb"]
    assert ours is not LlamaAttention.forward.__globals__["apply_rotary_pos_emb"]
