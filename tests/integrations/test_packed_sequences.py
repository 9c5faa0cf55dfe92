"""Encoders on batches with padding: which are packed, when, and that results stay."""

import copy

import pytest
import torch
import transformers
from support.exact import Doubles, assert_near, exact_copy
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from foo_ops.integrations import transformers as integration
from foo_ops.integrations.transformers import packed_sequences, replaced, restore
from foo_ops.integrations.transformers.attention import PackedSequences, foo_attention_forward

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
DISTILBERT = {"vocab_size": 60, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**SIZES),
    "roberta": lambda: transformers.RobertaConfig(**SIZES, pad_token_id=1),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**SIZES, pad_token_id=1),
    "electra": lambda: transformers.ElectraConfig(**SIZES, embedding_size=16),
    "distilbert": lambda: transformers.DistilBertConfig(**DISTILBERT),
}
LENGTHS = (9, 2, 13, 1, 13)
everywhere = pytest.mark.parametrize("name", CONFIGS)


def apply(model, packing=True, **options):
    return integration.apply(model, packing=packing, **options)


def build(name, kind=transformers.AutoModel, **options):
    torch.manual_seed(0)
    model = kind.from_config(CONFIGS[name](), **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(side="right", device="cpu"):
    """Return ids and their mask, with padding on one side, or with a hole in each sequence."""
    longest = max(LENGTHS)
    places, lengths = torch.arange(longest), torch.tensor(LENGTHS)[:, None]
    mask = places < lengths if side != "left" else places >= longest - lengths
    if side == "holes":
        mask = mask & (places != 1)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 60, mask.shape, generator=generator)
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}


@pytest.fixture
def packed(monkeypatch):
    """Return a list to which each packed call adds its number of tokens."""
    calls, own = [], packed_sequences.run_packed

    def spy(encoder, hidden_states, shown, keywords):
        calls.append(int(shown.sum()))
        return own(encoder, hidden_states, shown, keywords)

    monkeypatch.setattr(packed_sequences, "run_packed", spy)
    return calls


def hidden(model, given, **options):
    with torch.no_grad():
        return model(**given, **options).last_hidden_state


@everywhere
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "foo"])
@pytest.mark.parametrize("side", ["right", "holes"])
def test_tokens_are_computed_without_padding(name, implementation, side, packed, device):
    model = build(name, attn_implementation=implementation)
    given = batch(side)
    twin = exact_copy(model)
    twin.set_attn_implementation("eager")
    with Doubles():
        exact = hidden(twin, given)
    ours = apply(model.to(device))
    assert replaced(ours)["packing"] == 1
    packed.clear()
    found = hidden(ours, batch(side, device)).cpu()
    shown = given["attention_mask"].bool()
    assert packed == [int(shown.sum())]
    assert_near(found[shown], exact[shown], roundings=64)
    assert found[~shown].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype, packed):
    model, given = build("bert"), batch()
    with Doubles():
        exact = hidden(exact_copy(model.to(dtype)), given)
    ours, shown = hidden(apply(model), given), given["attention_mask"].bool()
    assert ours.dtype == dtype
    assert len(packed) == 2  # with the trial
    assert_near(ours[shown], exact[shown], roundings=64)


def test_poolers_and_gradients():
    given, results = batch(), []
    own = build("bert", transformers.AutoModelForSequenceClassification)
    labels = torch.tensor([0, 1, 1, 0, 1])
    for model in (own, apply(copy.deepcopy(own))):
        result = model(**given, labels=labels)
        result.loss.backward()
        results.append((result.logits, {k: it.grad for k, it in model.named_parameters()}))
    torch.testing.assert_close(*results)


def test_autocast(packed):
    model, given = build("bert"), batch()
    ours, shown = apply(copy.deepcopy(model)), given["attention_mask"].bool()
    packed.clear()
    with torch.autocast("cpu", torch.bfloat16):
        results = [hidden(it, given)[shown] for it in (ours, model)]
    assert packed == [sum(LENGTHS)]
    assert results[0].dtype == results[1].dtype
    torch.testing.assert_close(*results, rtol=0.1, atol=0.1)


def hooked(model):
    model.encoder.layer[1].register_forward_hook(lambda module, inputs, output: 2 * output)


def in_training(model):
    model.train()
    for it in model.modules():
        if isinstance(it, nn.Dropout):
            it.p = 0.0


OTHERWISE = {
    "left": (lambda model: None, batch("left"), {}),
    "nothing hidden": (lambda model: None, {"input_ids": batch()["input_ids"]}, {}),
    "a hook": (hooked, batch(), {}),
    "training": (in_training, batch(), {}),
    "hidden states": (lambda model: None, batch(), {"output_hidden_states": True}),
    "attentions": (lambda model: None, batch(), {"output_attentions": True}),
    "positions": (lambda model: None, batch(), {"position_ids": torch.arange(13).flip(0)[None]}),
    "a mask of pairs": (
        lambda model: None,
        {**batch(), "attention_mask": torch.ones(5, 1, 13, 13).tril().bool()},
        {},
    ),
}


def check_is_padded(model, case, packed):
    """Require the model's own results, and that no packed sequences have been noted."""
    change, given, options = case
    ours = apply(copy.deepcopy(model))
    assert replaced(ours)["packing"] == 1
    packed.clear()
    for it in (model, ours):
        change(it)
    with torch.no_grad():
        results = [it(**given, **options) for it in (ours, model)]
    assert packed == []
    assert results[0].keys() == results[1].keys()
    torch.testing.assert_close(results[0].to_tuple(), results[1].to_tuple())


@pytest.mark.parametrize("case", OTHERWISE)
def test_other_calls_are_computed_with_padding(case, packed):
    model = build("bert", attn_implementation="eager" if case == "attentions" else "sdpa")
    check_is_padded(model, OTHERWISE[case], packed)


def test_a_decoder_keeps_its_mask(packed):
    config = CONFIGS["bert"]()
    config.is_decoder = True
    model = transformers.BertModel(config).eval()
    given, ours = batch(), apply(copy.deepcopy(model))
    packed.clear()
    shown = given["attention_mask"].bool()
    results = [hidden(it, given, use_cache=False)[shown] for it in (ours, model)]
    assert packed == []
    torch.testing.assert_close(*results)


def test_compiled_models_are_computed_with_padding(packed):
    model, given = build("bert"), batch()
    expected = hidden(model, given)
    ours = apply(model)
    packed.clear()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    shown = given["attention_mask"].bool()
    torch.testing.assert_close(hidden(compiled, given)[shown], expected[shown])
    assert packed == []


class Neighbours(nn.Linear):
    """Sees the token before, as convolutions do."""

    def forward(self, input):
        return super().forward(input + input.roll(1, -2))


class Positions(nn.Linear):
    def forward(self, input):
        places = torch.arange(input.shape[-2]).to(input)
        return super().forward(input + 2e-3 * places[:, None])


@pytest.mark.parametrize("kind", [Neighbours, Positions])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_that_see_positions_stay(kind, dtype):
    model = build("bert")
    for layer in model.encoder.layer:
        layer.intermediate.dense.__class__ = kind
    assert "packing" not in replaced(apply(model.to(dtype)))


def test_layers_of_several_kinds_stay():
    model = build("bert")
    model.encoder.layer[1].attention.self.scaling = 1.0
    assert "packing" not in replaced(apply(model))


def test_quantised_layers(packed):
    model, given = build("bert"), batch()
    shown = given["attention_mask"].bool()
    padded = hidden(apply(copy.deepcopy(model), quantize=8, packing=False), given)
    packed.clear()
    torch.testing.assert_close(
        hidden(apply(model, quantize=8), given)[shown], padded[shown], rtol=0, atol=0.05
    )
    assert packed == [8 + 2 + 7, sum(LENGTHS)]  # with the trial


class SentenceTransformer(nn.Sequential):
    """Stands for that of sentence-transformers, which pools the tokens of a mask."""


DEFAULTS = {
    "encoder": (lambda: build("bert"), False),
    "tokens": (lambda: build("bert", transformers.AutoModelForTokenClassification), False),
    "classifier": (lambda: build("bert", transformers.AutoModelForSequenceClassification), True),
    "pooled": (lambda: SentenceTransformer(build("bert")), True),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_models_that_return_no_hidden_states_of_padding_are_packed_by_default(name):
    make, is_packed = DEFAULTS[name]
    model = make()
    assert ("packing" in replaced(integration.apply(copy.deepcopy(model)))) == is_packed
    assert "packing" not in replaced(apply(copy.deepcopy(model), packing=False))
    assert "packing" in replaced(apply(model))


@pytest.mark.parametrize("off", ["packing", "attention"])
def test_packed_sequences_needs_both(off):
    assert "packing" not in replaced(apply(build("bert"), **{off: False}))


def test_an_encoder_with_a_bias_of_positions_stays():
    config = transformers.MPNetConfig(**SIZES)
    model, given = transformers.AutoModel.from_config(config).eval(), batch()
    ours, shown = apply(copy.deepcopy(model)), given["attention_mask"].bool()
    assert "packing" not in replaced(ours)
    torch.testing.assert_close(hidden(ours, given)[shown], hidden(model, given)[shown])


def test_rotations_of_positions_stay():
    config = transformers.EsmConfig(**SIZES, pad_token_id=0, position_embedding_type="rotary")
    assert "packing" not in replaced(apply(transformers.EsmModel(config).eval()))


def attention_of_the_users_own(*arguments, **options):
    return sdpa_attention_forward(*arguments, **options)


def test_changes_after_apply(packed):
    """Another function of attention, and layers that are wrapped."""
    model, given = apply(build("bert")), batch()
    shown = given["attention_mask"].bool()
    expected = hidden(model, given)
    model.set_attn_implementation("eager")
    packed.clear()
    torch.testing.assert_close(hidden(model, given), expected)
    assert packed == [sum(LENGTHS)]
    transformers.AttentionInterface.register("mine", attention_of_the_users_own)
    transformers.AttentionMaskInterface.register("mine", sdpa_mask)
    model.set_attn_implementation("mine")
    torch.testing.assert_close(hidden(model, given)[shown], expected[shown])
    assert len(packed) == 1
    assert restore(model) is model
    torch.testing.assert_close(hidden(model, given)[shown], expected[shown])
    assert "packing" not in replaced(model)


@pytest.mark.parametrize(
    ("options", "name", "came"),
    [
        ({"dropout": 0.1}, "dropout", "float"),
        ({"position_bias": torch.zeros(1)}, "softcap, sinks, bias or indices", "True"),
        ({"sliding_window": 3}, "sliding_window", "int"),
        ({"temperature": 2.0}, "temperature", "float"),
    ],
    ids=["dropout", "bias", "window", "unknown"],
)
def test_options_that_packed_sequences_refuse(options, name, came):
    rows = torch.randn(1, 2, 5, 8)
    sequences = PackedSequences(torch.tensor([0, 2, 5], dtype=torch.int32), 3)
    with pytest.raises(NotImplementedError) as caught:
        foo_attention_forward(None, rows, rows, rows, sequences, **options)
    assert str(caught.value) == (
        f"attention of implementation 'packed sequences': {name} must be None, since this option "
        f"is unknown and may change the result, got {came}"
    )


# ------------------------------------------------------------------- models that know positions


def modernbert(kind=transformers.AutoModel, **options):
    """Return a model with layers of each type, and a window of 2 tokens on each side."""
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id"), 1)
    sizes = SIZES | {"num_hidden_layers": 5, "local_attention": 4, "global_attn_every_n_layers": 3}
    config = transformers.ModernBertConfig(**sizes, **special, sep_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    model = kind.from_config(config, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def packed_models(monkeypatch):
    """Return a list to which each packed call adds its number of tokens."""
    calls, own = [], packed_sequences.run_packed_model

    def spy(model, input_ids, inputs_embeds, shown, keywords):
        calls.append(int(shown.sum()))
        return own(model, input_ids, inputs_embeds, shown, keywords)

    monkeypatch.setattr(packed_sequences, "run_packed_model", spy)
    return calls


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "foo"])
@pytest.mark.parametrize("has_ids", [True, False])
def test_models_with_rotations(implementation, has_ids, packed_models, device):
    model, given = modernbert(attn_implementation=implementation), batch()
    if not has_ids:
        embedded = model.get_input_embeddings()(given["input_ids"]).detach()
        given = {"inputs_embeds": embedded, "attention_mask": given["attention_mask"]}
    twin = exact_copy(model)
    twin.set_attn_implementation("eager")
    with Doubles():
        exact = hidden(
            twin, {k: it.double() if it.is_floating_point() else it for k, it in given.items()}
        )
    ours = apply(model.to(device))
    assert replaced(ours)["packing"] == 1
    packed_models.clear()
    found = hidden(ours, {k: it.to(device) for k, it in given.items()}).cpu()
    shown = given["attention_mask"].bool()
    assert packed_models == [sum(LENGTHS)]
    assert_near(found[shown], exact[shown], roundings=64)
    assert found[~shown].eq(0).all()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_classifiers_with_rotations_and_gradients(pooling, packed_models):
    given, results = batch(), []
    own = modernbert(transformers.AutoModelForSequenceClassification)
    own.config.classifier_pooling = pooling
    labels = torch.tensor([0, 1, 1, 0, 1])
    for model in (own, integration.apply(copy.deepcopy(own))):
        result = model(**given, labels=labels)
        result.loss.backward()
        results.append((result.logits, {k: it.grad for k, it in model.named_parameters()}))
    torch.testing.assert_close(*results)
    assert packed_models[-1] == sum(LENGTHS)


MODELS_OTHERWISE = {
    "left": (lambda model: None, batch("left"), {}),
    "holes": (lambda model: None, batch("holes"), {}),
    "nothing hidden": (lambda model: None, {"input_ids": batch()["input_ids"]}, {}),
    "training": (in_training, batch(), {}),
    "hidden states": (lambda model: None, batch(), {"output_hidden_states": True}),
    "hidden states of a configuration": (
        lambda model: setattr(model.config, "output_hidden_states", True),
        batch(),
        {},
    ),
    "positions": (lambda model: None, batch(), {"position_ids": torch.arange(13).flip(0)[None]}),
    "a hook": (
        lambda model: model.layers[1].register_forward_hook(lambda *arguments: None),
        batch(),
        {},
    ),
}


@pytest.mark.parametrize("case", MODELS_OTHERWISE)
def test_other_calls_of_models_with_rotations(case, packed_models):
    check_is_padded(modernbert(), MODELS_OTHERWISE[case], packed_models)


@pytest.mark.parametrize("kind", [Neighbours, Positions])
def test_models_whose_layers_see_more_stay(kind):
    model = modernbert()
    model.layers[1].mlp.Wo.__class__ = kind
    assert "packing" not in replaced(apply(model))


def test_other_windows_of_layers_stay():
    """The window of a configuration is that of masks."""
    model = modernbert()
    own = type(model).forward

    class Wider(type(model)):
        def forward(
            self,
            input_ids=None,
            attention_mask=None,
            position_ids=None,
            inputs_embeds=None,
            **others,
        ):
            if isinstance(attention_mask, torch.Tensor):
                self.config.sliding_window += 1
            try:
                return own(self, input_ids, attention_mask, position_ids, inputs_embeds, **others)
            finally:
                if isinstance(attention_mask, torch.Tensor):
                    self.config.sliding_window -= 1

    model.__class__ = Wider
    assert "packing" not in replaced(apply(model))
