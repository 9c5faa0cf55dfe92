"""Dropout of foo::attention and foo::attention_varlen under torch.vmap."""

import pytest
import torch
import torch.nn.functional as F

attention = torch.ops.foo.attention

pytestmark = pytest.mark.usefixtures("one_thread")

UNIT = torch.eye(60)
RANDOM = {
    "attention": (attention, torch.zeros(1, 1, 50, 8), UNIT.expand(1, 1, -1, -1), (), {}),
    "packed": (
        torch.ops.foo.attention_varlen,
        torch.zeros(50, 1, 8),
        UNIT.unsqueeze(1),
        (torch.tensor([0, 50], dtype=torch.int32), torch.tensor([0, 60], dtype=torch.int32)),
        {"max_seqlen_q": 50, "max_seqlen_k": 60},
    ),
}
for_each_random = pytest.mark.parametrize("name", RANDOM)


def dropout_mask(name, randomness, device, *, count=3, in_dim=0, requires_grad=False, nested=False):
    """Return which weights dropout keeps for each of ``count`` equal slices of the query."""
    operator, query, value, sequences, keywords = RANDOM[name]
    value = value.to(device)
    key = torch.zeros_like(value[..., :8])
    sequences = [tensor.to(device) for tensor in sequences]

    def function(query):
        return operator(query, key, value, *sequences, **keywords, dropout_p=0.5)[0]

    queries = torch.stack([query.to(device)] * count).requires_grad_(requires_grad)
    if nested:
        outer, inner = randomness
        mapped = torch.vmap(torch.vmap(function, randomness=inner), randomness=outer)
        return mapped(queries.unsqueeze(1).expand(-1, 2, *queries.shape[1:])) != 0
    if in_dim is None:
        # Only another tensor is mapped.
        mapped = torch.vmap(lambda x: function(queries[0]) + x, randomness=randomness)
        return mapped(torch.zeros(count, device=device)) != 0
    output = torch.vmap(function, randomness=randomness)(queries)
    assert output.requires_grad == requires_grad
    return output != 0


@for_each_random
@pytest.mark.parametrize("in_dim", [0, None], ids=["mapped", "not mapped"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no gradient", "gradient"])
def test_vmap_refuses_dropout_unless_told_how(name, in_dim, requires_grad, device):
    """The message is torch's own."""
    with pytest.raises(RuntimeError) as of_torch:
        torch.vmap(F.dropout)(torch.zeros(3))
    with pytest.raises(RuntimeError) as ours:
        dropout_mask(name, "error", device, in_dim=in_dim, requires_grad=requires_grad)
    assert str(ours.value) == str(of_torch.value)
    assert "called random operation while in randomness error mode" in str(ours.value)


@for_each_random
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no gradient", "gradient"])
def test_vmap_with_the_same_dropout(name, requires_grad, device):
    mask = dropout_mask(name, "same", device, requires_grad=requires_grad)
    assert torch.equal(mask, mask[:1].expand_as(mask))
    assert 0.4 < mask.double().mean() < 0.6
    assert not torch.equal(dropout_mask(name, "same", device), mask)


@for_each_random
@pytest.mark.parametrize("in_dim", [0, None], ids=["mapped", "not mapped"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no gradient", "gradient"])
def test_vmap_with_different_dropout(name, in_dim, requires_grad, device):
    """Two slices agree in half of their 3000 weights."""
    requires_grad = requires_grad and in_dim is not None
    mask = dropout_mask(name, "different", device, in_dim=in_dim, requires_grad=requires_grad)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert 0.4 < (mask[first] == mask[second]).double().mean() < 0.6


@for_each_random
@pytest.mark.parametrize("outer", ["same", "different"])
@pytest.mark.parametrize("inner", ["same", "different"])
def test_vmap_within_vmap_with_dropout(name, outer, inner, device):
    """Each vmap level follows its own randomness option."""
    mask = dropout_mask(name, (outer, inner), device, nested=True)
    assert torch.equal(mask[0], mask[1]) == (outer == "same")
    assert torch.equal(mask[:, 0], mask[:, 1]) == (inner == "same")


@for_each_random
def test_vmap_with_dropout_under_autocast(name, device):
    operator, query, value, sequences, keywords = RANDOM[name]
    inputs = [tensor.to(device) for tensor in (query, value[..., :8], value, *sequences)]

    def function(query):
        return operator(query, *inputs[1:], **keywords, dropout_p=0.5)

    with torch.autocast(device, torch.bfloat16):
        output, logsumexp = torch.vmap(function, randomness="same")(torch.stack([inputs[0]] * 2))
    assert (output.dtype, logsumexp.dtype) == (torch.bfloat16, torch.float32)


@for_each_random
def test_gradients_of_a_vmap_with_dropout(name, device):
    """The gradient of value is the transposed weights: 2 / 60 where dropout keeps them."""
    operator, query, value, sequences, keywords = RANDOM[name]
    query, value, *sequences = (tensor.to(device) for tensor in (query, value, *sequences))
    values = torch.stack([value] * 3).requires_grad_()

    def function(value):
        key = torch.zeros_like(value[..., :8])
        return operator(query, key, value, *sequences, **keywords, dropout_p=0.5)[0]

    output = torch.vmap(function, randomness="different")(values)
    (gradient,) = torch.autograd.grad(output.sum(), values)
    # The query dimension comes before the heads if packed; the key dimension stays in place.
    by_key = (output != 0).sum(-2 if name == "attention" else -3).double() * 2 / 60
    expected = by_key.unsqueeze(-1) if name == "attention" else by_key.mT.unsqueeze(-1)
    torch.testing.assert_close(gradient.double(), expected.expand_as(gradient), rtol=1e-5, atol=0)
