"""`apply(model, quantize=4, keep_weights=False, method="awq", prompts=...)`."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
import transformers
from support.exact import Doubles, assert_near, exact_copy
from support.transformer_models import FAMILIES, decoder, run, tokens
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from foo_ops.integrations.transformers import (
    activation_aware,
    apply,
    left_alone,
    replaced,
    save_quantized,
)
from foo_ops.integrations.transformers.packed import FooPackedLinear

WIDTH = {"hidden_size": 96, "num_attention_heads": 6}
SIZES = {**WIDTH, "head_dim": 16}
SMALL = {
    **WIDTH,
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
OTHERS = {
    "OPT": lambda: transformers.OPTConfig(**SMALL, ffn_dim=128, word_embed_proj_dim=96),
    "T5": lambda: transformers.T5Config(
        vocab_size=97, d_model=96, d_kv=16, num_heads=6, d_ff=128, num_layers=2
    ),
    "Bert": lambda: transformers.BertConfig(**SMALL, intermediate_size=128),
}
APPLY = {"quantize": 4, "keep_weights": False, "method": "awq"}
PROMPTS = [tokens(4, 32)]


def build(name, dtype=torch.float32, device="cpu"):
    """Build a model whose norms and biases are not those of the start."""
    if name in FAMILIES:
        model = decoder(name, device, dtype, **SIZES)
    else:
        torch.manual_seed(0)
        kind = getattr(
            transformers, {"OPT": "OPTForCausalLM", "Bert": "BertModel"}.get(name, "T5Model")
        )
        model = kind(OTHERS[name]()).to(device, dtype).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                random = torch.rand(parameter.shape, generator=generator)
                parameter += (2 * random**6).to(parameter)
    return model


def prompts_for(model):
    ids = PROMPTS[0].to(model.device)
    if isinstance(model, transformers.T5Model):
        return [{"input_ids": ids, "decoder_input_ids": ids.flip(1)}]
    return [ids]


def outputs_of(model, prompt):
    device = next(model.parameters()).device
    if isinstance(prompt, dict):
        prompt = {name: it.to(device) for name, it in prompt.items()}
    else:
        prompt = prompt.to(device)
    with torch.no_grad():
        return activation_aware.run(model, prompt)[0].cpu()


def linear_layers(model):
    return [it for it in model.modules() if type(it) is nn.Linear and it.weight.shape[1] % 32 == 0]


def untied(model):
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [it for it in linear_layers(model) if it is not head]


def carriers_of(model, layers=None, prompts=None):
    """Return the carrier of each layer by their names."""
    layers = untied(model) if layers is None else layers
    prompt = (prompts_for(model) if prompts is None else prompts)[0]
    with torch.no_grad(), activation_aware.as_in_inference(model):
        groups = activation_aware.find_groups(model, layers, prompt)
    names = {module: name for name, module in model.named_modules()}
    return {names[layer]: names.get(it.carrier) for it in groups for layer in it.layers}


# ----------------------------------------------------------------------------------------- carriers


ATTENTION = {"q_proj": "input_layernorm", "k_proj": "input_layernorm", "v_proj": "input_layernorm"}
LLAMA = {
    **{f"self_attn.{name}": norm for name, norm in ATTENTION.items()},
    "self_attn.o_proj": "self_attn.v_proj",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
    "mlp.down_proj": "mlp.up_proj",
}
GEMMA2 = {**LLAMA, **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "pre_feedforward_layernorm")}
PHI3 = {
    "self_attn.qkv_proj": "input_layernorm",
    "self_attn.o_proj": "self_attn.qkv_proj",
    "mlp.gate_up_proj": "post_attention_layernorm",
    "mlp.down_proj": "mlp.gate_up_proj",
}
COHERE = {**LLAMA, **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "input_layernorm")}
# Its GELU is in between.
PHI = {
    **{f"self_attn.{name}": norm for name, norm in ATTENTION.items()},
    "self_attn.dense": "self_attn.v_proj",
    "mlp.fc1": "input_layernorm",
    "mlp.fc2": None,
}
# Their router and their experts read the norm, too.
QWEN2_MOE = {
    **{name: it for name, it in LLAMA.items() if "mlp" not in name},
    "mlp.shared_expert_gate": None,
    "mlp.shared_expert.gate_proj": None,
    "mlp.shared_expert.up_proj": None,
    "mlp.shared_expert.down_proj": "mlp.shared_expert.up_proj",
}
MIXTRAL = {name: it for name, it in LLAMA.items() if "mlp" not in name}
DECODERS = {
    "llama": LLAMA,
    "Qwen2": LLAMA,
    "Qwen3": LLAMA,
    "Gemma": LLAMA,
    "gemma2: softcap, windows in every second layer": GEMMA2,
    "Cohere": COHERE,
    "Phi3": PHI3,
    "Phi": PHI,
    "qwen2_moe: windows that only the mask tells of": QWEN2_MOE,
    "Mixtral": MIXTRAL,
}
OPT = {
    **{f"self_attn.{name}": "self_attn_layer_norm" for name in ATTENTION},
    "self_attn.out_proj": "self_attn.v_proj",
    "fc1": "final_layer_norm",
    # ReLU passes positive factors on.
    "fc2": "fc1",
}


def in_layer(place, names):
    return {
        f"{place}.{layer}": carrier and f"{place}.{carrier}" for layer, carrier in names.items()
    }


@pytest.mark.parametrize("name", DECODERS)
def test_carriers(name):
    places = ("model.layers.0", "model.layers.1")
    expected = {}
    for place in places:
        expected |= in_layer(place, DECODERS[name])
    assert carriers_of(build(name)) == expected


def test_carriers_of_small_numbers():
    """In float16, numbers below 6e-5 have fewer bits, and are rounded otherwise in a trial."""
    model = build("llama", torch.float16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight *= 0.001
            layer.self_attn.v_proj.weight *= 0.001
    assert carriers_of(model) == carriers_of(build("llama"))


def test_carriers_of_others():
    expected = in_layer("model.decoder.layers.0", OPT) | in_layer("model.decoder.layers.1", OPT)
    assert carriers_of(build("OPT")) == expected
    # Residual sums read the norms of BERT, but no other module reads the values.
    bert = {name: it for name, it in carriers_of(build("Bert")).items() if it is not None}
    values = "encoder.layer.{}.attention.self.value"
    assert bert == {f"encoder.layer.{n}.attention.output.dense": values.format(n) for n in range(2)}
    t5 = carriers_of(build("T5"))
    # The results of an encoder stay as they are.
    cross = "decoder.block.1.layer.1.EncDecAttention"
    assert t5[f"{cross}.k"] is t5[f"{cross}.v"] is None
    assert t5[f"{cross}.q"] == "decoder.block.1.layer.1.layer_norm"
    assert t5[f"{cross}.o"] == f"{cross}.v"
    assert t5["encoder.block.1.layer.1.DenseReluDense.wo"].endswith("DenseReluDense.wi")


def test_the_last_norm_stays():
    """The head reads it, and so does everyone who calls the model without its head."""
    model = build("llama")
    assert carriers_of(model, linear_layers(model))["lm_head"] is None
    before = model.model.norm.weight.clone()
    apply(model, **APPLY, prompts=PROMPTS)
    assert isinstance(model.lm_head, FooPackedLinear)
    assert torch.equal(model.model.norm.weight, before)


class Side(nn.Module):
    """Two blocks; the first one's hidden numbers may be read elsewhere."""

    def __init__(self, reads="nothing", is_zero=False):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(64, eps=1e-6)
        self.first = nn.ModuleDict({"up": nn.Linear(64, 32), "down": nn.Linear(32, 64)})
        self.last = nn.Linear(64, 64)
        self.reads, self.is_zero = reads, is_zero

    def forward(self, input):
        normed = self.norm(input)
        hidden = self.first["up"](normed)
        if self.is_zero:
            hidden = hidden.abs().sqrt() * 0
        output = self.first["down"](hidden)
        if self.reads == "hidden":
            output = output + hidden.sum(-1, keepdim=True)
        if self.reads == "norm":
            output = output + normed
        return self.last(output.tanh())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("options", "up", "down"),
    [
        ({}, "norm", "first.up"),
        ({"reads": "hidden"}, "norm", None),
        ({"reads": "norm"}, None, "first.up"),
        ({"is_zero": True}, "norm", None),
    ],
)
def test_readers_that_are_no_modules(options, up, down, dtype):
    model = Side(**options).to(dtype)
    found = carriers_of(model, linear_layers(model), [torch.randn(3, 64).to(dtype)])
    assert found == {"first.up": up, "first.down": down, "last": None}


class Block(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        self.seen = seen

    def forward(self, input):
        hidden = self.up(input)
        self.seen.append(hidden)
        return self.down(hidden)


class Sharing(nn.Module):
    """Reads what a block has put aside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.seen = []
        self.blocks = nn.ModuleList(Block(self.seen) for _ in range(3))

    def forward(self, input):
        self.seen.clear()
        for block in self.blocks:
            input = block(input).tanh()
        return input + self.seen[1]


def test_readers_of_attributes():
    """The trial of a block does not see them; that of the whole model does, and finds which."""
    model = Sharing()
    found = carriers_of(model, linear_layers(model), [torch.randn(3, 32)])
    carried = {name: it for name, it in found.items() if it is not None}
    assert carried == {f"blocks.{n}.down": f"blocks.{n}.up" for n in (0, 2)}


class Halves(nn.Module):
    """Two layers read halves of what a first one computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.both = nn.Linear(32, 64)
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, input):
        one, other = self.both(input).chunk(2, -1)
        return self.one(one * 1.0) + self.other(other * 2.0)


def test_no_module_carries_two_scales():
    model = Halves()
    found = carriers_of(model, linear_layers(model), [torch.randn(3, 32)])
    assert found == {"both": None, "one": "both", "other": None}


def test_shared_weights():
    """A weight that two modules have is no carrier's."""
    model = Side()
    model.other = nn.RMSNorm(64, eps=1e-6)
    model.other.weight = model.norm.weight
    assert carriers_of(model, linear_layers(model), [torch.randn(3, 64)])["first.up"] is None


# ------------------------------------------------------------------------------------------ scales


def scaled_without_rounding(model, prompts):
    """Change a model as `apply` does, but keep its weights wide; return how many are changed."""
    found = activation_aware.find_scalings(model, untied(model), prompts)
    with torch.no_grad():
        for layer, scaling in found.items():
            layer.weight.copy_(scaling.divided(layer.weight) * scaling.columns)
            if layer.bias is not None:
                layer.bias.copy_(scaling.divided(layer.bias))
    return sum(bool((it.columns != 1).any()) for it in found.values())


@pytest.mark.parametrize("name", [*DECODERS, *OTHERS])
def test_scales_leave_the_function(name, device):
    """Before anything is rounded, outputs for other inputs are the same."""
    model = build(name, device=device)
    ids = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(5))
    prompt = {"input_ids": ids, "decoder_input_ids": ids} if name == "T5" else ids
    twin = exact_copy(model)
    # OPT makes masks of its own, and has no norm that converts to float32.
    with nullcontext() if name == "OPT" else Doubles():
        exact = outputs_of(twin, prompt)
    changed = scaled_without_rounding(model, prompts_for(model))
    assert changed > len(untied(model)) // 2 or name == "Bert"
    assert_near(outputs_of(model, prompt), exact, roundings=512)


def test_scales_leave_the_function_in_float64():
    model, ids = build("Phi", torch.float64), tokens(2, 12)
    before = outputs_of(model, ids)
    assert scaled_without_rounding(model, PROMPTS) > 8
    torch.testing.assert_close(outputs_of(model, ids), before, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "Gemma", "OPT"])
def test_norms_are_divided_exactly(name, dtype):
    """The scale that is returned is the quotient of the weights, rounded as they are."""
    norm = next(it for it in build(name, dtype).modules() if "Norm" in type(it).__name__)
    offset = 1.0 if name == "Gemma" else 0.0
    with torch.no_grad():
        norm.weight[3] = -offset
    before = norm.weight.detach().double() + offset
    scale = torch.linspace(0.3, 3.0, len(before))
    exact = activation_aware.divide_norm(norm, scale)
    after = norm.weight.detach().double() + offset
    assert norm.weight.dtype == dtype
    assert norm.weight.requires_grad
    torch.testing.assert_close(after * exact.double(), before, rtol=1e-6, atol=0)
    assert exact[3] == 1
    room = 3 * torch.finfo(dtype).eps / before[before != 0].abs().min().clamp(max=1)
    near = exact.double()[before != 0] / scale.double()[before != 0] - 1
    assert near.abs().max() <= room


def with_outliers(model):
    """Make some columns of the inputs of layers far larger than others."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("layernorm"):
                chosen = torch.randperm(len(module.weight), generator=generator)[:4]
                module.weight[chosen] *= 20
    return model


def test_outputs_are_better():
    ids = torch.randint(1, 97, (2, 30), generator=torch.Generator().manual_seed(5))
    exact = outputs_of(with_outliers(build("llama")), ids)

    def error(**options):
        model = apply(with_outliers(build("llama")), quantize=4, keep_weights=False, **options)
        return ((outputs_of(model, ids) - exact).norm() / exact.norm()).item()

    nearest = error()
    assert error(method="awq", prompts=PROMPTS) < 0.75 * nearest
    # Prompts as dicts, several of them.
    prompts = [{"input_ids": it} for it in PROMPTS[0].split(2)]
    assert error(method="awq", prompts=prompts) < 0.75 * nearest


@pytest.mark.parametrize("name", ["llama", "Qwen2"])
def test_integers_are_those_of_the_search(name, device):
    """Numbers of each layer are near those that are scaled and not rounded."""
    model = with_outliers(build(name, device=device))
    twin = copy.deepcopy(model)
    scaled_without_rounding(twin, [it.to(device) for it in PROMPTS])
    apply(model, **APPLY, prompts=[it.to(device) for it in PROMPTS])
    assert not left_alone(model)
    assert replaced(model)["quantize"] == 15
    others = dict(twin.named_modules())
    for place, layer in model.named_modules():
        if isinstance(layer, FooPackedLinear) and place != "lm_head":
            wide = others[place].weight.detach().cpu().double()
            if layer.bias is not None:
                torch.testing.assert_close(layer.bias, others[place].bias)
            size = layer.in_features // layer.scale.shape[1]
            groups = layer.weight.cpu().double().unflatten(1, (-1, size // 2))
            integers = torch.cat((groups % 16, groups // 16), -1).floor()
            scale, zero = (it.cpu().double().unsqueeze(-1) for it in (layer.scale, layer.zero))
            errors = (integers - zero) * scale - wide.unflatten(1, (-1, size))
            # Half a step, or where a range is narrower, what is beyond it.
            largest = wide.unflatten(1, (-1, size)).abs().amax(-1, keepdim=True)
            assert (errors.abs() <= torch.maximum(0.51 * scale, 0.35 * largest)).all()


# ------------------------------------------------------------------------------------ whole models


def test_padding_is_not_sampled():
    def quantised(filler):
        ids, mask = tokens(4, 40), torch.ones(4, 40, dtype=torch.int64)
        mask[:3, :11] = 0
        ids[mask == 0] = filler
        model = build("llama")
        return apply(model, **APPLY, prompts=[{"input_ids": ids, "attention_mask": mask}])

    one, other = (quantised(it).state_dict() for it in (0, 50))
    assert all(torch.equal(it, other[name]) for name, it in one.items())


def hooks_of(model):
    return [(len(it._forward_hooks), len(it._forward_pre_hooks)) for it in model.modules()]


def test_model_is_as_before():
    """Calls during the search leave no hook, and modes and caches as they were."""
    model = build("llama").train()
    model.model.layers[0].eval()
    # transformers puts hooks of its own there in the first call.
    run(model, None, tokens(1, 3))
    before = hooks_of(model)
    apply(model, **APPLY, prompts=PROMPTS, cache=False)
    assert model.training
    assert not model.model.layers[0].training
    assert model.config.use_cache
    assert hooks_of(model) == before
    assert all(it.weight.requires_grad for it in model.modules() if "Norm" in type(it).__name__)


def test_after_an_earlier_apply():
    model, ids = build("llama"), tokens(1, 7)
    apply(model, quantize=8)
    apply(model, **APPLY, prompts=PROMPTS)
    twin = apply(build("llama"), **APPLY, prompts=PROMPTS)
    assert replaced(model) == replaced(twin)
    error = (run(model, None, ids) - run(twin, None, ids)).norm()
    # Norms of an applied model round otherwise, so that a scale may be another.
    assert error <= 0.3 * run(twin, None, ids).norm()


def test_tied_heads_and_layers_without_carriers():
    tied = decoder("llama", tie_word_embeddings=True, **SIZES)
    apply(tied, **APPLY, prompts=PROMPTS)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert not isinstance(tied.lm_head, FooPackedLinear)
    gpt2 = apply(decoder("GPT2", **SIZES), **APPLY, prompts=PROMPTS)
    assert replaced(gpt2)["quantize"] == 9


def test_experts_are_rounded_to_the_nearest():
    name = "qwen2_moe: windows that only the mask tells of"
    model, twin = build(name), build(name)
    apply(model, **APPLY, prompts=PROMPTS)
    apply(twin, quantize=4, keep_weights=False)
    ours, nearest = model.state_dict(), twin.state_dict()
    assert ours.keys() == nearest.keys()
    same = [key for key, it in ours.items() if torch.equal(it, nearest[key])]
    norms = [f"model.layers.{n}.post_attention_layernorm.weight" for n in range(2)]
    routers = [f"model.layers.{n}.mlp.gate.weight" for n in range(2)]
    assert {*norms, *routers} <= set(same)
    assert all(".experts." not in key or key in same for key in ours)
    assert "model.layers.0.input_layernorm.weight" not in same


def test_activations():
    ids = tokens(2, 20)
    exact = outputs_of(with_outliers(build("llama")), ids)
    model = with_outliers(build("llama"))
    apply(model, **APPLY, prompts=PROMPTS, activations=8)
    error = (outputs_of(model, ids) - exact).norm() / exact.norm()
    nearest = apply(with_outliers(build("llama")), quantize=4, keep_weights=False, activations=8)
    assert error < 0.75 * (outputs_of(nearest, ids) - exact).norm() / exact.norm()


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_saved_models(tmp_path):
    """Files have what all of compressed-tensors' have: zeros are integers, norms are divided."""
    model, ids = build("llama"), tokens(2, 12)
    apply(model, **APPLY, prompts=PROMPTS)
    save_quantized(model, tmp_path)
    again = apply(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(run(again, None, ids), run(model, None, ids))
    pytest.importorskip("compressed_tensors")
    config = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert not replaced(theirs)
    torch.testing.assert_close(
        run(theirs, "eager", ids), run(model, None, ids), rtol=1e-4, atol=1e-4
    )


# ------------------------------------------------------------------------------------------ errors


REFUSED = [
    ({"prompts": None}, ValueError, "method='awq' needs prompts, got None"),
    ({"prompts": []}, ValueError, "method='awq' needs prompts, got []"),
    (
        {"prompts": tokens(1, 3)},
        TypeError,
        "prompts must be a list of token ids (tensors) and of dicts, got Tensor",
    ),
    (
        {"prompts": (it for it in PROMPTS)},
        TypeError,
        "prompts must be a list of token ids (tensors) and of dicts, got generator",
    ),
    (
        {"prompts": ["text"]},
        TypeError,
        "prompts must be a list of token ids (tensors) and of dicts, got str",
    ),
    (
        {"prompts": [tokens(1, 9), tokens(2, 9)]},
        ValueError,
        "prompts must have 64 tokens or more, got 27",
    ),
    (
        {"prompts": PROMPTS, "method": "nearest"},
        ValueError,
        "prompts must be None for method='nearest', got a list",
    ),
    (
        {"prompts": PROMPTS, "quantize": 8},
        ValueError,
        "method='awq' needs quantize=4, got 8",
    ),
    (
        {"prompts": PROMPTS, "keep_weights": True},
        ValueError,
        "method='awq' needs keep_weights=False, got True",
    ),
    (
        {"method": "gptq"},
        ValueError,
        "method must be 'nearest', 'hqq' or 'awq', got 'gptq'",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_refused(options, error, message):
    model = build("llama")
    before = {name: it.clone() for name, it in model.state_dict().items()}
    with pytest.raises(error, match=f"^{re.escape(f'apply: {message}')}$"):
        apply(model, **APPLY | options)
    assert not replaced(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(it, after[name]) for name, it in before.items())
