"""foo::moe_experts in mixtures of transformers: by `apply`, and as experts_implementation="foo".

tests/models.py compares all mixtures of transformers with themselves.
"""

import copy

import pytest
import torch
from support.exact import assert_near
from support.transformer_models import rounded
from torch import nn

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from foo_ops.integrations.transformers import apply, left_alone, replaced, restore
from foo_ops.integrations.transformers import experts as foo_experts

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}


def make(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model


def loss_and_gradients(model, tokens):
    model.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    gradients = [it.grad for it in model.parameters() if it.grad is not None]
    return [loss.detach(), *gradients]


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("config_class", [Qwen3MoeConfig, GptOssConfig])
def test_models_agree_with_themselves(config_class, by_name):
    model = make(config_class(**SIZES))
    tokens = torch.randint(50, (2, 9))
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    expected = loss_and_gradients(exact, tokens)
    calls = []
    if by_name:
        model.set_experts_implementation("foo")
    else:
        apply(model)
        assert replaced(model)["experts"] == 2
        assert not left_alone(model)
    with pytest.MonkeyPatch.context() as patch:
        operator = foo_experts.moe_experts
        patch.setattr(
            foo_experts, "moe_experts", lambda *a, **k: calls.append(1) or operator(*a, **k)
        )
        found = loss_and_gradients(model, tokens)
    assert len(calls) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs.double(), roundings=256)
    restore(model)
    assert "experts" not in replaced(model)


class Config:
    """The configuration of a single module of experts."""

    _experts_implementation = "eager"
    hidden, columns, experts = 16, 12, 4


def experts_class(apply_gate=None, act_fn=None, post_norm=False, **flags):
    """Make a class of experts as transformers' models have them, with a gate of its own."""

    class SomeExperts(nn.Module):
        def __init__(self, config):
            super().__init__()
            shape = config.experts, config.hidden, config.columns
            width = 2 * config.columns if flags.get("has_gate", True) else config.columns
            self.num_experts = config.experts
            name = "gate_up_proj" if flags.get("has_gate", True) else "up_proj"
            up = torch.randn(config.experts, width, config.hidden)
            down = torch.randn(shape)
            if flags.get("is_transposed"):
                up, down = up.mT.contiguous(), down.mT.contiguous()
            setattr(self, name, nn.Parameter(up))
            self.down_proj = nn.Parameter(down)
            self.act_fn = act_fn or nn.SiLU()
            if post_norm:
                self.post_expert_norm = nn.LayerNorm(config.hidden)

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return ALL_EXPERTS_FUNCTIONS["batched_mm"](
                self, hidden_states, top_k_index, top_k_weights
            )

    if apply_gate is not None:
        SomeExperts._apply_gate = apply_gate
    return use_experts_implementation(has_post_expert_norm=post_norm, **flags)(SomeExperts)


def squared_gate(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return gate.square() * up


def clamped_after(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return self.act_fn(gate).clamp(max=0.5) * up


KNOWN = {
    "silu": ({}, True),
    "gelu": ({"act_fn": nn.GELU()}, True),
    "gelu with tanh": ({"act_fn": nn.GELU(approximate="tanh")}, True),
    "without a gate": ({"has_gate": False, "act_fn": nn.ReLU()}, True),
    "transposed": ({"is_transposed": True}, True),
    "another gate": ({"apply_gate": squared_gate}, False),
    "clamped behind the activation": ({"apply_gate": clamped_after}, False),
    "a norm behind each expert": ({"post_norm": True}, True),
}


@pytest.mark.parametrize("name", KNOWN)
def test_gates(name):
    """A gate that the operator does not know is the module's own code, between two products."""
    options, is_known = KNOWN[name]
    torch.manual_seed(0)
    module = experts_class(**options)(Config())
    assert (foo_experts.gate_of(module) is not None) == is_known
    hidden, index = torch.randn(7, 16), torch.randint(4, (7, 2))
    weights = torch.rand(7, 2)
    exact = copy.deepcopy(module).double()(hidden.double(), index, weights.double())
    apply(module)
    norms = {"layer_norm": 1} if "post_norm" in options else {}
    assert replaced(module) == {"experts": 1, **norms}
    assert_near(module(hidden, index, weights), exact, roundings=64)


def test_experts_of_another_process_are_skipped():
    """Their index is the number of experts."""
    torch.manual_seed(0)
    module = experts_class(apply_gate=squared_gate)(Config())
    known = experts_class()(Config())
    hidden, weights = torch.randn(5, 16), torch.rand(5, 2)
    index = torch.randint(5, (5, 2))
    for it in (module, known):
        it._is_expert_parallel = True
        exact = copy.deepcopy(it).double()(hidden.double(), index, weights.double())
        assert_near(
            foo_experts.foo_experts_forward(it, hidden, index, weights), exact, roundings=64
        )


def test_hooks_of_an_activation_run():
    module = apply(experts_class()(Config()))
    seen = []
    module.act_fn.register_forward_hook(lambda *_: seen.append(1))
    module(torch.randn(3, 16), torch.randint(4, (3, 2)), torch.rand(3, 2))
    assert seen == [1]


def test_other_dtypes_go_to_the_module_s_own():
    module = apply(experts_class()(Config()).to(torch.bfloat16))
    hidden, index, weights = torch.randn(3, 16), torch.randint(4, (3, 2)), torch.rand(3, 2)
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        module(hidden, index, weights)


def test_a_router_in_float32():
    module = apply(experts_class()(Config()).to(torch.bfloat16))
    hidden, index = torch.randn(3, 16).bfloat16(), torch.randint(4, (3, 2))
    output = module(hidden, index, torch.rand(3, 2))
    assert output.dtype == torch.bfloat16


def test_left_alone():
    class OwnExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.ones(2, 4, 3))

    model = nn.Sequential(OwnExperts(), experts_class()(Config()))
    apply(model, experts=False)
    assert left_alone(model) == {
        "0": "transformers' experts_implementation does not cover them",
        "1": "not selected by the arguments of apply",
    }


@pytest.mark.whole
def test_hybrids_with_experts_agree():
    config = NemotronHConfig(**SIZES, layers_block_type=["moe", "attention"], n_routed_experts=6)
    model = make(config)
    tokens = torch.randint(50, (1, 9))
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    assert_near(apply(model)(tokens).logits, exact(tokens).logits.double(), roundings=256)
    assert replaced(model)["experts"] == 1


# --------------------------------------------------------------------------- apply(quantize=...)


class WideConfig(Config):
    hidden, columns = 64, 32


def routed(tokens=7, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 64, generator=generator).to(dtype)
    index = torch.randint(4, (tokens, 2), generator=generator)
    return hidden, index, torch.rand(tokens, 2, generator=generator)


def with_rounded_weights(module, bits):
    """Return a copy in float64 whose weights are those of the quantised copy."""
    twin = copy.deepcopy(module).double()
    for name in foo_experts.names_of_weights(module):
        setattr(twin, name, rounded(getattr(module, name), bits, module.is_transposed))
    return twin


KINDS = {
    "silu": {},
    "without a gate": {"has_gate": False, "act_fn": nn.ReLU()},
    "transposed": {"is_transposed": True},
}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_few_bits(kind, bits):
    torch.manual_seed(0)
    module = experts_class(**KINDS[kind])(WideConfig()).eval()
    before = {name: it.clone() for name, it in module.state_dict().items()}
    exact = with_rounded_weights(module, bits)
    given = routed()
    wide = given[0].double(), given[1], given[2].double()
    own, expected = copy.deepcopy(module).double()(*wide).detach(), exact(*wide)
    apply(module, quantize=bits)
    assert replaced(module) == {"experts": 1, "quantize": 1}
    assert not left_alone(module)
    with torch.no_grad():
        assert_near(module(*given), expected.detach(), roundings=128)
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], it) for name, it in before.items())
    # Training reads the weights themselves.
    assert_near(module.train()(*given).detach(), own, roundings=128)
    restore(module)
    assert not list(module.buffers())
    assert_near(module.eval()(*given).detach(), own, roundings=128)


def test_gradients_of_weights_go_straight_through_their_rounding():
    torch.manual_seed(0)
    module = experts_class()(WideConfig()).eval()
    exact, given = with_rounded_weights(module, 4), routed()
    apply(module, quantize=4)
    output, expected = module(*given), exact(given[0].double(), given[1], given[2].double())
    assert_near(output.detach(), expected.detach(), roundings=128)
    output.sum().backward()
    expected.sum().backward()
    for name in ("gate_up_proj", "down_proj"):
        assert_near(getattr(module, name).grad, getattr(exact, name).grad, roundings=256)


def change_in_place(module):
    with torch.no_grad():
        module.down_proj.mul_(0.5)


def change_through_data(module):
    module.gate_up_proj.data += 0.25


def change_one_number_through_data(module):
    module.gate_up_proj.data[1, 2, 3] += 30
    module.eval()


def load(module):
    module.load_state_dict({name: 0.5 * it for name, it in module.state_dict().items()})


def convert(module):
    module.bfloat16().float()


CHANGES = (change_in_place, change_through_data, change_one_number_through_data, load, convert)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_copies_follow_their_weights(change, is_transposed):
    torch.manual_seed(0)
    flags = {"is_transposed": is_transposed}
    module = apply(experts_class(**flags)(WideConfig()).eval(), quantize=8)
    other = experts_class(**flags)(WideConfig()).eval()
    given = routed()
    with torch.no_grad():
        module(*given)
        change(module)
        other.load_state_dict(module.state_dict())
        assert torch.equal(module(*given), apply(other, quantize=8)(*given))


def test_copies_of_experts_are_quantised():
    module = apply(experts_class()(WideConfig()).eval(), quantize=4)
    twin = copy.deepcopy(module)
    given = routed()
    with torch.no_grad():
        assert torch.equal(twin(*given), module(*given))
        change_in_place(twin)
        assert not torch.equal(twin(*given), module(*given))


def test_widths_without_groups_stay():
    module = apply(experts_class()(Config()).eval(), quantize=4)
    assert replaced(module) == {"experts": 1}


def test_quantised_experts_are_compiled():
    torch.manual_seed(0)
    module = apply(experts_class()(WideConfig()).eval(), quantize=8)
    given = routed()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(*given), module(*given))
        change_in_place(module)
        assert torch.equal(compiled(*given), module(*given))
