"""In training, head and loss are one operator, and logits are not computed."""

import inspect
import threading

import pytest
import torch
import transformers
from support.exact import Doubles, assert_as_near, exact_copy
from support.transformer_models import ENCODERS, FAMILIES, SIZES, build, decoder, tokens
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from foo_ops.integrations.transformers import apply, replaced, restore

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = "llama"
ROUNDINGS = 128
# With a soft cap of the logits, and without.
FUSED = {"foo::linear_cross_entropy", "foo::linear_cross_entropy_training"}


class Recorder(TorchDispatchMode):
    """Records the operators that run, and the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.names, self.shapes = set(), set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.names.add(operator.name())
        results = result if isinstance(result, (tuple, list)) else [result]
        if operator.name() == "foo::linear_cross_entropy_training":
            # The exponentials kept for the gradients are at most as many as the weight's elements.
            assert results[3].numel() <= args[1].numel()
            results = results[:3]
        self.shapes |= {tuple(it.shape) for it in results if isinstance(it, torch.Tensor)}
        return result


def labels_of(inputs):
    return inputs.masked_fill(inputs % 5 == 0, -100)


def trained(model, **options):
    """Return the output of a training step, and the recorded operators."""
    inputs = tokens(2, 14).to(model.device)
    with Recorder() as recorder:
        output = model(inputs, labels=labels_of(inputs), **options)
        (output[0] if isinstance(output, tuple) else output.loss).backward()
    return output, recorder


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_never_there(name, device):
    model = apply(decoder(name, device)).train()
    output, recorder = trained(model)
    assert output.logits is None
    assert "logits" not in output
    assert recorder.names & FUSED
    assert "foo::softmax_cross_entropy" not in recorder.names
    vocabulary = model.config.vocab_size
    # Logits have 2 x 14 or 28 rows; the weight's own gradient has other sizes.
    assert not {(2, 14, vocabulary), (28, vocabulary)} & recorder.shapes


@pytest.mark.parametrize("name", FAMILIES)
def test_other_outputs_stay(name):
    model = decoder(name)
    ours, theirs = apply(decoder(name)).train(), model.train()
    kept = set(trained(theirs)[0]) - {"logits"}
    output, _ = trained(ours)
    assert set(output) == kept
    assert type(output) is type(trained(theirs)[0])


def test_evaluation_has_logits(device):
    model, inputs = apply(decoder(LLAMA, device)), tokens(2, 14).to(device)
    trained(model.train())
    for output in (model(inputs), model.eval()(inputs), model(inputs, labels=inputs)):
        assert type(output.logits) is torch.Tensor
        assert output.logits.shape == (2, 14, model.config.vocab_size)


def test_tuples_have_logits():
    """Tuples have no names, so no output can be left out."""
    model = apply(decoder(LLAMA)).train()
    output, _ = trained(model, return_dict=False)
    assert output[1].shape == (2, 14, model.config.vocab_size)


def test_logits_on_request():
    model = apply(decoder(LLAMA), fused_loss=False).train()
    output, recorder = trained(model)
    assert output.logits.shape == (2, 14, model.config.vocab_size)
    assert not recorder.names & FUSED
    assert "fused_loss" not in replaced(model)


@pytest.mark.parametrize("change", ["hook", "adapter", "subclass"])
def test_heads_that_do_more_give_logits(change):
    """A hook, a wrapper of the layer and a weight of another type stay in effect."""
    model = apply(decoder(LLAMA)).train()
    calls = []
    if change == "hook":
        model.lm_head.register_forward_hook(lambda *arguments: calls.append(arguments))
    elif change == "adapter":
        model.lm_head = nn.Sequential(model.lm_head)
    else:
        weight = model.lm_head.weight.detach()
        model.lm_head.weight = nn.Parameter(weight.as_subclass(type("Weight", (torch.Tensor,), {})))
    output, recorder = trained(model)
    assert output.logits.shape == (2, 14, model.config.vocab_size)
    assert not recorder.names & FUSED
    assert len(calls) == (change == "hook")


def test_a_loss_of_the_users_own_gets_logits():
    model = decoder(LLAMA)
    model.loss_function = lambda logits, labels, **others: F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    expected = trained(model)[0]
    output = trained(apply(model).train())[0]
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.logits, expected.logits)


def step(model):
    """Return a step's loss and gradients, by name."""
    inputs = tokens(2, 14).to(model.device)
    model.zero_grad()
    loss = model(inputs, labels=labels_of(inputs)).loss
    loss.backward()
    # Adding to all keys changes no softmax: that gradient is rounding errors only.
    parameters = {key: it for key, it in model.named_parameters() if not key.endswith("key.bias")}
    gradients = {key: it.grad.cpu() for key, it in parameters.items() if it.grad is not None}
    return {"loss": loss.detach().cpu(), **gradients}


OTHERS = {
    "BertForMaskedLM": lambda: transformers.BertConfig(**SIZES),
    "T5ForConditionalGeneration": lambda: transformers.T5Config(
        vocab_size=97, d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=6, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    ),
    "CohereForCausalLM": lambda: transformers.CohereConfig(
        **SIZES, num_key_value_heads=2, logit_scale=0.3
    ),
    "GraniteForCausalLM": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=7.0),
    "Gemma2ForCausalLM": lambda: transformers.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=8, final_logit_softcapping=1.7
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_models_do_to_logits(name, device):
    """Losses of their own, factors and soft caps; most use the one operator, too."""
    config = OTHERS[name]()
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).to(device).train()
    model.set_attn_implementation("eager")
    theirs, twin = step(model), exact_copy(model)
    with Doubles():
        exact = step(twin)
    with Recorder() as recorder:
        ours = step(apply(model))
    assert recorder.names & FUSED
    assert ours.keys() == theirs.keys() == exact.keys()
    assert_as_near(ours.values(), theirs.values(), exact.values(), ROUNDINGS)


def test_signature_and_restore():
    model = decoder(LLAMA)
    own, before = type(model), inspect.signature(model.forward)
    apply(model)
    assert inspect.signature(model.forward) == before
    assert type(model) is not own
    assert isinstance(model, own)
    trained(model.train())
    assert type(restore(model)) is own
    assert trained(model)[0].logits is not None


def test_another_thread_gets_logits():
    model, inputs, found = apply(decoder(LLAMA)).train(), tokens(2, 14), []

    def look():
        with torch.no_grad():
            found.append(model(inputs).logits)

    def loss(logits, labels, vocab_size, **others):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))

    model.loss_function = loss
    assert model(inputs, labels=inputs).logits is None
    assert [type(it) for it in found] == [torch.Tensor]


def test_an_error_leaves_the_head_as_it_was():
    model = apply(decoder(LLAMA)).train()
    with pytest.raises(IndexError, match="target must be a class in"):
        model(tokens(2, 14), labels=torch.full((2, 14), 97))
    assert type(model(tokens(2, 14)).logits) is torch.Tensor


def test_encoders_without_a_head_stay():
    model = build(transformers.AutoModel, ENCODERS["bert"])
    assert "fused_loss" not in replaced(apply(model))
