"""MLPs whose activation is the epilogue of a product: which ones, and with which layers."""

import copy
import pickle

import pytest
import torch
import transformers
from support.exact import assert_near
from torch import nn
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.distilbert.modeling_distilbert import FFN
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense
from transformers.models.vit.modeling_vit import ViTMLP

import foo_ops
from foo_ops.integrations.transformers import apply, left_alone, mlp, replaced, restore

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 16
T5 = {"d_model": WIDTH, "d_ff": 24, "dropout_rate": 0.3}
BERT = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2}


def bert(activation="gelu"):
    return BertIntermediate(transformers.BertConfig(**BERT, hidden_act=activation))


MODULES = {
    "bert": (bert, "gelu"),
    "bert, by elements": (lambda: bert("gelu_new"), "gelu_tanh"),
    "gpt2": (lambda: GPT2MLP(24, transformers.GPT2Config(n_embd=WIDTH)), "gelu_tanh"),
    "vit": (lambda: ViTMLP(transformers.ViTConfig(**BERT)), "gelu"),
    "distilbert": (lambda: FFN(transformers.DistilBertConfig(dim=WIDTH, hidden_dim=24)), "gelu"),
    "t5": (lambda: T5DenseActDense(transformers.T5Config(**T5)), "relu"),
    "flan t5": (
        lambda: T5DenseGatedActDense(
            transformers.T5Config(**T5, feed_forward_proj="gated-gelu", dense_act_fn="gelu_new")
        ),
        "gelu_tanh",
    ),
    "gemma": (
        lambda: GemmaMLP(transformers.GemmaConfig(**BERT, hidden_act="gelu_pytorch_tanh")),
        "gelu_tanh",
    ),
}
everywhere = pytest.mark.parametrize("name", MODULES)


def build(name):
    torch.manual_seed(0)
    return MODULES[name][0]().eval()


@pytest.fixture
def epilogues(monkeypatch):
    """Return a list to which each product with an activation adds its name."""
    calls = []

    def spy(*arguments, activation):
        calls.append(activation)
        return foo_ops.linear(*arguments, activation=activation)

    monkeypatch.setattr(mlp, "linear", spy)
    return calls


@everywhere
def test_one_product(name, epilogues, device):
    module, input = build(name), torch.randn(3, 5, WIDTH)
    exact = copy.deepcopy(module).double()(input.double()).detach()
    ours = apply(module.to(device))
    assert replaced(ours)["mlp"] == 1
    assert left_alone(ours) == {}
    assert_near(ours(input.to(device)).detach(), exact)
    assert epilogues == [MODULES[name][1]]


@everywhere
def test_gradients_and_dropout(name):
    """Dropout draws what the module's own forward draws, and gradients are those of it."""
    own, results = build(name).train(), []
    input = torch.randn(3, 5, WIDTH, requires_grad=True)
    for module in (own, apply(copy.deepcopy(own))):
        torch.manual_seed(1)
        output = module(input)
        results.append((output, *torch.autograd.grad(output.sum(), [input, *module.parameters()])))
    torch.testing.assert_close(*results)


@everywhere
def test_copies_and_the_way_back(name):
    module, input = build(name), torch.randn(2, WIDTH)
    names = set(vars(module))
    ours = apply(copy.deepcopy(module))
    expected = ours(input)
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert made(input).equal(expected)
    compiled = torch.compile(copy.deepcopy(ours), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(input), expected)
    assert set(vars(restore(ours))) == names
    assert ours(input).equal(module(input))


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


def hook(part):
    part.register_forward_hook(lambda module, inputs, output: 3 * output)


@pytest.mark.parametrize("change", ["hook of the layer", "hook of the activation", "adapter", "8"])
def test_changed_parts_are_called(change, epilogues):
    module, input = build("gpt2"), torch.randn(3, WIDTH)
    ours = apply(copy.deepcopy(module), quantize=8 if change == "8" else None)
    for it in (module, ours):
        if change == "hook of the layer":
            hook(it.c_fc)
        elif change == "hook of the activation":
            hook(it.act)
        elif change == "adapter":
            it.c_fc = Adapter(it.c_fc)
    room = 0.05 if change == "8" else 1e-5
    torch.testing.assert_close(ours(input), module(input), rtol=room, atol=room)
    assert epilogues == []
    if change != "8":
        # Hooks and adapters of the last layer change nothing about the first.
        last = apply(build("gpt2"))
        hook(last.c_proj)
        torch.testing.assert_close(last(input), 3 * build("gpt2")(input))
        assert epilogues == ["gelu_tanh"]


def test_a_last_layer_of_another_dtype(epilogues):
    """T5 models keep some layers in float32."""
    module = build("flan t5").bfloat16()
    module.wo.float()
    ours, input = apply(copy.deepcopy(module)), torch.randn(2, WIDTH, dtype=torch.bfloat16)
    assert ours(input).dtype == torch.float32
    torch.testing.assert_close(ours(input), module(input))
    assert epilogues == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@everywhere
def test_autocast_keeps_its_dtypes(name, dtype, device):
    module, input = build(name).to(device), torch.randn(2, WIDTH, device=device).to(dtype)
    with torch.autocast(device, torch.bfloat16):
        theirs, ours = module(input), apply(copy.deepcopy(module))(input)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)


class Twice(BertIntermediate):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Skip(GPT2MLP):
    def forward(self, hidden_states):
        return super().forward(hidden_states) + hidden_states


@pytest.mark.parametrize("activation", ["quick_gelu", "tanh", "gelu_10", "relu2", "mish"])
def test_other_activations_stay(activation):
    assert replaced(apply(bert(activation))) == {"linear": 1}
    # Without linear layers of ours there is no epilogue.
    assert replaced(apply(bert(), linear=False)) == {}


def test_other_forms_stay():
    config = transformers.BertConfig(**BERT)
    assert replaced(apply(Twice(config))) == {"linear": 1}
    other = bert()
    other.dense = Scaled(WIDTH, 24)
    assert replaced(apply(other)) == {}
    assert replaced(apply(Skip(24, transformers.GPT2Config(n_embd=WIDTH)))) == {"linear": 2}
