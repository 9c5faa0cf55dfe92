"""Logits whose computation is deferred are a tensor in every other respect."""

import copy
import inspect

import numpy
import pytest
import torch
import transformers
from support.transformer_models import SIZES, decoder, tokens
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from foo_ops.integrations.transformers import apply
from foo_ops.integrations.transformers.linear import (
    OF_CLASSES,
    DeferredLogits,
    DeferredTensor,
    defer,
    is_special,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def deferred(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 8, dtype=dtype), torch.randn(11, 8, dtype=dtype)
    bias = torch.randn(11, dtype=dtype) if bias else None
    return defer(hidden, weight, bias), F.linear(hidden, weight, bias)


CHANGES = {
    "scaled": lambda it: 3 * it * 0.5 / 4,
    "capped": lambda it: torch.tanh(it / 3.0) * 3.0,
    "scaled and capped": lambda it: (it * 0.7 / 3.0).tanh() * 3.0,
    "another cap": lambda it: (it * 0.7 / 3.0).tanh() * 2.0,
    "float32": lambda it: it.float().contiguous(),
    "fewer": lambda it: it[..., 1:, :],
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_need_no_logits(name):
    lazy, logits = deferred(torch.float64)
    changed, expected = CHANGES[name](lazy), CHANGES[name](logits)
    assert isinstance(changed, DeferredLogits)
    assert changed.shape == expected.shape
    assert changed.dtype == expected.dtype
    target = torch.randint(11, (expected.shape[0] * expected.shape[1],))
    loss = F.cross_entropy(changed.view(-1, 11), target)
    assert changed.computed is None
    torch.testing.assert_close(loss, F.cross_entropy(expected.reshape(-1, 11), target))
    torch.testing.assert_close(changed.tensor(), expected)


USES = {
    "sum": lambda it: it.sum(),
    "function": lambda it: torch.softmax(it, -1),
    "keyword": lambda it: torch.softmax(input=it, dim=-1),
    "other operand": lambda it: torch.add(torch.ones(2, 5, 11), it),
    "a tensor's factor": lambda it: it * torch.tensor(2.0),
    "a tensor's divisor": lambda it: it / torch.arange(1.0, 12.0),
    "classes": lambda it: it[..., :3],
    "one position": lambda it: it[:, -1],
    "another shape": lambda it: it.reshape(-1),
    "second tanh": lambda it: it.tanh().tanh(),
    "negative cap": lambda it: F.cross_entropy((it.tanh() * -2.0).view(-1, 11), torch.arange(10)),
    "weights of classes": lambda it: F.cross_entropy(
        it.view(-1, 11), torch.arange(10), weight=torch.arange(11.0)
    ),
    "probabilities": lambda it: F.cross_entropy(it.view(-1, 11), torch.full((10, 11), 1 / 11)),
    "classes behind": lambda it: F.cross_entropy(it, torch.zeros(2, 11, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", USES)
def test_uses_that_need_logits(name):
    lazy, logits = deferred()
    torch.testing.assert_close(USES[name](lazy), USES[name](logits))


def test_options_of_cross_entropy():
    lazy, logits = deferred(torch.float64)
    target = torch.tensor([3, -1, 4, 10, 0, -1, 2, 2, 7, 8])
    options = {"ignore_index": -1, "label_smoothing": 0.2}
    for reduction in ("none", "sum", "mean"):
        loss = F.cross_entropy(lazy.view(-1, 11), target, reduction=reduction, **options)
        expected = F.cross_entropy(logits.view(-1, 11), target, reduction=reduction, **options)
        torch.testing.assert_close(loss, expected)
    assert lazy.computed is None


def test_logits_are_computed_once():
    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.count += operator is torch.ops.foo.linear.default
            return operator(*args, **(kwargs or {}))

    lazy, _ = deferred()
    with Counter() as counter:
        lazy.sum(), lazy.max(), torch.softmax(lazy, -1)
    assert counter.count == 1


def test_the_loss_has_the_dtype_of_the_logits():
    lazy, _ = deferred(torch.bfloat16)
    target = torch.arange(10)
    assert F.cross_entropy(lazy.view(-1, 11), target).dtype == torch.bfloat16
    assert F.cross_entropy(lazy.float().view(-1, 11), target).dtype == torch.float32


# ------------------------------------------------------------------------------ written in place


def masked(logits):
    logits.masked_fill_(torch.arange(11) < 5, -9.0)
    return logits.view(-1, 11)


def written_behind_a_view(logits):
    rows = logits.view(-1, 11)
    logits.clamp_(-0.5, 0.5)
    return rows


def written_in_a_view(logits):
    logits[..., 1:, :].div_(3.0)
    return logits.float().view(-1, 11)


def written_behind_copies(logits):
    part, scaled = logits[..., 1:, :].contiguous(), logits * 2.0
    logits.zero_()
    return torch.cat([part.view(-1, 11), scaled.tanh().view(-1, 11), logits.view(-1, 11)])


def classes_set(logits):
    logits[..., 3] = -7.0
    return logits.reshape(-1, 11)


def scaled_in_place(logits):
    logits *= 2.0
    logits /= torch.arange(1.0, 12.0)
    return logits.contiguous().view(-1, 11)


def data_set(logits):
    logits.data = logits.detach() + 1.0
    return logits.view(-1, 11)


def looked_at(logits):
    with torch.inference_mode():
        logits.argmax(-1)
    with torch.no_grad():
        constant = logits * 2.0
    return torch.cat([logits.view(-1, 11), constant.view(-1, 11)])


IN_PLACE = (
    masked,
    written_behind_a_view,
    written_in_a_view,
    written_behind_copies,
    classes_set,
    scaled_in_place,
    data_set,
    looked_at,
)


@pytest.mark.parametrize("change", IN_PLACE)
def test_all_follows_from_what_was_computed(change):
    hidden, weight = torch.randn(2, 5, 8), torch.randn(11, 8, requires_grad=True)
    results = []
    for make in (defer, F.linear):
        rows = change(make(hidden, weight, None))
        loss = F.cross_entropy(rows, torch.arange(len(rows)) % 11)
        results.append((loss, *torch.autograd.grad(loss, weight)))
    torch.testing.assert_close(*results)


def test_model_whose_loss_writes_in_place():
    model, inputs = decoder("llama"), tokens(2, 14)

    def loss(logits, labels, vocab_size, **others):
        logits.masked_fill_(torch.arange(vocab_size) < 50, -9.0)
        return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))

    model.loss_function = loss
    expected = model.train()(inputs, labels=inputs)
    output = apply(model)(inputs, labels=inputs)
    torch.testing.assert_close((output.loss, output.logits), (expected.loss, expected.logits))


def test_model_that_sets_its_logits():
    images = {"<image>": 96, **{f"IMGIMG{letter}Z": 90 + i for i, letter in enumerate("ABCD")}}
    quantiser = {"embed_dim": 8, "num_embeddings": 16, "resolution": 16, "base_channels": 32}
    quantiser |= {"channel_multiplier": [1, 1], "num_res_blocks": 1}
    torch.manual_seed(0)
    model = transformers.ChameleonForConditionalGeneration(
        transformers.ChameleonConfig(
            **SIZES, num_key_value_heads=2, vocabulary_map=images, vq_config=quantiser
        )
    )
    inputs = tokens(2, 14).clamp(max=80)
    expected = model.train()(inputs, labels=inputs)
    output = apply(model)(inputs, labels=inputs)
    torch.testing.assert_close((output.loss, output.logits), (expected.loss, expected.logits))


@pytest.mark.parametrize("change", [lambda it: it.float(), lambda it: it + 1.0])
def test_a_loss_outside_of_the_autocast_of_its_head(change):
    hidden, weight = torch.randn(2, 5, 8).bfloat16(), torch.randn(11, 8, requires_grad=True)
    results = []
    for make in (defer, F.linear):
        with torch.autocast("cpu", torch.bfloat16):
            logits = make(hidden, weight, None)
        loss = F.cross_entropy(change(logits).view(-1, 11), torch.arange(10))
        results.append((loss.float(), *torch.autograd.grad(loss, weight)))
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


# -------------------------------------------------------------------------------- special methods


SPECIAL = sorted(
    name
    for name in dir(torch.Tensor)
    if is_special(name)
    and callable(inspect.getattr_static(torch.Tensor, name))
    and getattr(torch.Tensor, name) is not getattr(object, name, None)
    and name not in {*OF_CLASSES, "__class__", "__hash__", "__torch_function__"}
)
ARGUMENTS = (
    (),
    (2.0,),
    (torch.full((2, 5, 11), 2.0),),
    (torch.ones(11, 3),),
    (0, 1.0),
    ("",),
    ({},),
)
"""Each method accepts some of these arguments, and refuses the others."""


def outcome(name, logits, arguments):
    try:
        result = getattr(type(logits), name)(logits, *copy.deepcopy(arguments))
    except Exception as error:
        return type(error)
    if result is NotImplemented:
        return TypeError
    if isinstance(result, numpy.ndarray) and result.dtype == float:
        return torch.from_numpy(result)
    if isinstance(result, DeferredLogits):
        return result.tensor()
    if hasattr(result, "__next__"):
        return list(result)
    return result if isinstance(result, (torch.Tensor, str, bool, int)) else type(result)


@pytest.mark.filterwarnings("ignore:This overload of add is deprecated")
@pytest.mark.parametrize("kind", [DeferredLogits, DeferredTensor])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_methods(name, kind):
    hidden, weight = torch.randn(2, 5, 8).double(), torch.randn(11, 8).double()
    for arguments in ARGUMENTS:
        lazy, logits = kind(hidden, weight, None), F.linear(hidden, weight)
        found, expected = (outcome(name, it, arguments) for it in (lazy, logits))
        if isinstance(expected, (torch.Tensor, list)):
            torch.testing.assert_close(found, expected)
        else:
            assert found == expected
        torch.testing.assert_close(lazy.tensor(), logits)


OPERATORS = {
    "number - logits": lambda it: 1 - it,
    "number / logits": lambda it: 1 / it,
    "powers": lambda it: abs(-it) ** 2 % 2,
    "comparison": lambda it: (it == it.clone()) & (it > 0),
    "iteration": lambda it: torch.stack([*it]),
    "shape by name": lambda it: it.reshape(shape=(-1, 11)),
    "shape as a list": lambda it: it.reshape([-1, 11]),
    "memory format": lambda it: it.contiguous(memory_format=torch.contiguous_format),
    "another dtype": lambda it: it.view(torch.int64).view(torch.float64),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    lazy, logits = deferred(torch.float64)
    result = OPERATORS[name](lazy)
    result = result.tensor() if isinstance(result, DeferredLogits) else result
    torch.testing.assert_close(result, OPERATORS[name](logits))


def test_logits_are_a_tensor():
    lazy, _ = deferred()
    assert isinstance(lazy, torch.Tensor)
    assert len({lazy, lazy}) == 1
    assert lazy.computed is None
