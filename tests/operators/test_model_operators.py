"""Options and errors of the operators that models need besides attention.

Properties of every operator are tested in test_matrix.py.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from support.exact import assert_near
from torch._subclasses.fake_tensor import FakeTensorMode

import foo_ops


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def add_rms_norm(input, residual, weight=None):
    return foo_ops.add_rms_norm(input, residual, weight)


def loss(logits, target, **options):
    return foo_ops.softmax_cross_entropy(logits, target, **options)


REFUSED = {
    "integer input": (
        foo_ops.rms_norm,
        lambda: (zeros(3, 4, dtype=torch.int64),),
        TypeError,
        "rms_norm: input must be floating-point, got int64",
    ),
    "0-d input": (
        foo_ops.rms_norm,
        lambda: (zeros(),),
        ValueError,
        "rms_norm: input must have at least 1 dimension, got 0",
    ),
    "weight of another length": (
        foo_ops.rms_norm,
        lambda: (zeros(3, 4), zeros(5)),
        ValueError,
        "rms_norm: weight must have shape [4] as input's rows have, got [5]",
    ),
    "integer weight": (
        foo_ops.rms_norm,
        lambda: (zeros(3, 4), zeros(4, dtype=torch.int8)),
        TypeError,
        "rms_norm: weight must be floating-point, got int8",
    ),
    "residual of another shape": (
        add_rms_norm,
        lambda: (zeros(3, 4), zeros(4)),
        ValueError,
        "add_rms_norm: residual must have shape [3, 4] as input has, got [4]",
    ),
    "residual of another dtype": (
        add_rms_norm,
        lambda: (zeros(3, 4), zeros(3, 4, dtype=torch.bfloat16)),
        TypeError,
        "add_rms_norm: residual must be float32 as input is, got bfloat16",
    ),
    "bias of another length": (
        foo_ops.layer_norm,
        lambda: (zeros(3, 4), zeros(4), zeros(5)),
        ValueError,
        "layer_norm: bias must have shape [4] as input's rows have, got [5]",
    ),
    "weight of another length beside a bias": (
        foo_ops.layer_norm,
        lambda: (zeros(3, 4), zeros(5), zeros(4)),
        ValueError,
        "layer_norm: weight must have shape [4] as input's rows have, got [5]",
    ),
    "0-d rows": (
        foo_ops.layer_norm,
        lambda: (zeros(),),
        ValueError,
        "layer_norm: input must have at least 1 dimension, got 0",
    ),
    "integer bias": (
        foo_ops.layer_norm,
        lambda: (zeros(3, 4), zeros(4), zeros(4, dtype=torch.int8)),
        TypeError,
        "layer_norm: bias must be floating-point, got int8",
    ),
    "another residual": (
        foo_ops.add_layer_norm,
        lambda: (zeros(3, 4), zeros(4)),
        ValueError,
        "add_layer_norm: residual must have shape [3, 4] as input has, got [4]",
    ),
    "residual in double precision": (
        foo_ops.add_layer_norm,
        lambda: (zeros(3, 4), zeros(3, 4, dtype=torch.float64)),
        TypeError,
        "add_layer_norm: residual must be float32 as input is, got float64",
    ),
    "integer gate": (
        foo_ops.silu_mul,
        lambda: (zeros(3, dtype=torch.int32), zeros(3, dtype=torch.int32)),
        TypeError,
        "silu_mul: gate and up must have a floating-point dtype, got int32",
    ),
    "integer query": (
        foo_ops.rotary_embedding,
        lambda: (zeros(3, 4, dtype=torch.int64), zeros(3, 2), zeros(3, 2)),
        TypeError,
        "rotary_embedding: input must be floating-point, got int64",
    ),
    "sine of another shape": (
        foo_ops.rotary_embedding,
        lambda: (zeros(3, 4), zeros(3, 2), zeros(2)),
        ValueError,
        "rotary_embedding: sine must have shape [3, 2] as cosine has, got [2]",
    ),
    "tables in double precision": (
        foo_ops.rotary_embedding,
        lambda: (zeros(3, 4, dtype=torch.bfloat16), zeros(2), zeros(2, dtype=torch.float64)),
        TypeError,
        "rotary_embedding: sine must be float16, bfloat16 or float32 where input is bfloat16, got "
        "float64",
    ),
    "input in double precision": (
        foo_ops.rotary_embedding,
        lambda: (zeros(3, 4, dtype=torch.float64), zeros(2), zeros(2)),
        TypeError,
        "rotary_embedding: cosine must be float64 where input is float64, got float32",
    ),
    "tables that are too long": (
        foo_ops.rotary_embedding,
        lambda: (zeros(3, 5), zeros(3, 3), zeros(3, 3)),
        ValueError,
        "rotary_embedding: cosine must have a last dimension of at most 2, half of input's, got 3",
    ),
    "tables that do not broadcast": (
        foo_ops.rotary_embedding,
        lambda: (zeros(3, 4), zeros(2, 2), zeros(2, 2)),
        ValueError,
        "rotary_embedding: cosine must have leading dimensions that broadcast to [3] as input has, "
        "got [2]",
    ),
    "tables with more dimensions": (
        foo_ops.rotary_embedding,
        lambda: (zeros(3, 4), zeros(1, 3, 2), zeros(1, 3, 2)),
        ValueError,
        "rotary_embedding: cosine must have leading dimensions that broadcast to [3] as input has, "
        "got [1, 3]",
    ),
    "float target": (
        loss,
        lambda: (zeros(3, 4), zeros(3)),
        TypeError,
        "softmax_cross_entropy: target must be int64, got float32",
    ),
    "target of another shape": (
        loss,
        lambda: (zeros(3, 4), zeros(2, dtype=torch.int64)),
        ValueError,
        "softmax_cross_entropy: target must have shape [3] to match the rows of logits, got [2]",
    ),
    "too smooth": (
        lambda logits, target: loss(logits, target, label_smoothing=1.5),
        lambda: (zeros(3, 4), zeros(3, dtype=torch.int64)),
        ValueError,
        "softmax_cross_entropy: label_smoothing must be in [0, 1], got 1.5",
    ),
    "unknown reduction": (
        lambda logits, target: loss(logits, target, reduction="max"),
        lambda: (zeros(3, 4), zeros(3, dtype=torch.int64)),
        ValueError,
        "softmax_cross_entropy: reduction must be one of none, mean, sum, got 'max'",
    ),
}


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("is_fake", [False, True], ids=["eager", "fake"])
@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name, is_fake, device):
    function, make, error, message = REFUSED[name]
    arguments = [tensor.to(device) for tensor in make()]
    if is_fake:
        mode = FakeTensorMode()
        arguments = [mode.from_tensor(tensor) for tensor in arguments]
    with pytest.raises(error, match=rf"\A{re.escape(message)}\Z"):
        function(*arguments)


MIXED = {
    "rms_norm": (foo_ops.rms_norm, ((3, 4), (4,)), "weight"),
    "add_rms_norm": (foo_ops.add_rms_norm, ((3, 4), (3, 4)), "residual"),
    "layer_norm": (foo_ops.layer_norm, ((3, 4), (4,)), "weight"),
    "add_layer_norm": (foo_ops.add_layer_norm, ((3, 4), (3, 4)), "residual"),
    "rotary_embedding": (foo_ops.rotary_embedding, ((3, 4), (3, 2), (3, 2)), "cosine"),
}


@pytest.mark.parametrize("is_fake", [False, True], ids=["eager", "fake"])
@pytest.mark.parametrize("name", MIXED)
def test_refuses_mixed_devices(name, is_fake):
    function, shapes, argument = MIXED[name]
    first, *others = (torch.zeros(shape) for shape in shapes)
    arguments = [first.to("foo"), *others]
    if is_fake:
        mode = FakeTensorMode()
        arguments = [mode.from_tensor(tensor) for tensor in arguments]
    message = f"{name}: {argument} must be on foo:0 as input is, got cpu"
    with pytest.raises(ValueError, match=rf"\A{re.escape(message)}\Z"):
        function(*arguments)


@pytest.mark.parametrize("is_fake", [False, True], ids=["eager", "fake"])
def test_elementwise_operators_refuse_mixed_devices_as_torch_does(is_fake):
    gate, up, scale = torch.ones(3, device="foo"), torch.ones(3), torch.tensor(2.0)
    if is_fake:
        mode = FakeTensorMode()
        gate, up, scale = (mode.from_tensor(tensor) for tensor in (gate, up, scale))
    message = (
        "Expected all tensors to be on the same device, but found at least two devices, foo:0 and "
        "cpu!"
    )
    with pytest.raises(RuntimeError, match=rf"\A{re.escape(message)}\Z"):
        foo_ops.silu_mul(gate, up)
    # A tensor without dimensions may stay on its device.
    for result in (foo_ops.silu_mul(gate, scale), foo_ops.silu_mul(scale, gate)):
        assert result.device == gate.device


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
def test_refuses_targets_that_are_no_classes(wrong, device):
    logits = torch.zeros(2, 3, 4, device=device, requires_grad=True)
    target = torch.zeros(2, 3, dtype=torch.int64, device=device)
    target[1, 1] = wrong
    ranges = "a class in [0, 4) or ignore_index -100"
    message = f"softmax_cross_entropy: target must be {ranges}, got {wrong}"
    with pytest.raises(IndexError, match=rf"\A{re.escape(message)}\Z"):
        foo_ops.softmax_cross_entropy(logits, target)
    # A class out of range is valid only as ignore_index.
    foo_ops.softmax_cross_entropy(logits, target, ignore_index=wrong).backward()
    per_row = torch.zeros(2, 3, device=device)
    message = message.replace("entropy:", "entropy_backward:")
    with pytest.raises(IndexError, match=rf"\A{re.escape(message)}\Z"):
        torch.ops.foo.softmax_cross_entropy_backward(per_row, None, None, logits, target, per_row)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 2}], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_reductions_are_those_of_torch(reduction, options):
    logits = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    target = torch.arange(9) % 5
    ours = foo_ops.softmax_cross_entropy(logits, target, reduction=reduction, **options)
    theirs = F.cross_entropy(logits, target, reduction=reduction, **options)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(it.square().sum(), logits) for it in (ours, theirs)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("places", [(0,), (2,), (0, 2), (1499,), (2, 1499)], ids=str)
def test_an_infinite_logit(places, smoothing, device):
    """As in torch, the row has neither loss nor gradient, whatever the target."""
    logits = torch.randn(3, 1500, dtype=torch.float64)
    logits[1, list(places)], logits[1, 7] = torch.inf, -torch.inf
    ours = logits.float().to(device)
    found, target = [], torch.tensor([1, 0, 2])
    for x, function, keywords in (
        (logits, F.cross_entropy, {}),
        (ours, foo_ops.softmax_cross_entropy, {"return_logsumexp": True}),
    ):
        result = function(
            x.requires_grad_(),
            target.to(x.device),
            reduction="none",
            label_smoothing=smoothing,
            **keywords,
        )
        loss, logsumexp = result if keywords else (result, x.logsumexp(-1))
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        found.append([it.detach().cpu().double() for it in (loss, logsumexp, gradient)])
    assert found[0][0].isnan().tolist() == [False, True, False]
    assert found[0][2].isnan().all(-1).tolist() == [False, True, False]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_mean_of_nothing():
    target = torch.full((3,), -100)
    assert foo_ops.softmax_cross_entropy(torch.zeros(3, 4), target).isnan()


def test_logsumexp_on_request():
    logits = torch.randn(3, 4, requires_grad=True)
    target = torch.tensor([0, 1, 2])
    value, logsumexp = foo_ops.softmax_cross_entropy(logits, target, return_logsumexp=True)
    assert_near(value, F.cross_entropy(logits.double(), target))
    assert_near(logsumexp, logits.double().logsumexp(-1))


def test_nothing_of_the_size_of_the_logits_is_kept():
    """Besides the logits themselves, only loss and logsumexp are kept: one number per row each."""
    logits = torch.randn(64, 5000, device="foo", requires_grad=True)
    target = torch.zeros(64, dtype=torch.int64, device="foo")
    torch.foo.synchronize()
    before = torch.foo.memory_allocated()
    torch.foo.reset_peak_memory_stats()
    value = foo_ops.softmax_cross_entropy(logits, target)
    assert torch.foo.max_memory_allocated() - before < 8192
    value.backward()
    assert torch.foo.max_memory_allocated() - before < logits.nbytes + 16_384


def test_rotary_in_place():
    query = torch.randn(2, 5, 8)
    cosine, sine = torch.randn(5, 4), torch.randn(5, 4)
    expected = foo_ops.rotary_embedding(query, cosine, sine)
    result = foo_ops.rotary_embedding(query, cosine, sine, inplace=True)
    assert result is query
    assert query.equal(expected)


def test_rotary_keeps_its_input_only_for_gradients_of_the_tables():
    query = torch.randn(5, 8, requires_grad=True)
    cosine, sine = torch.randn(5, 4), torch.randn(5, 4)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor)
    with hooks:
        foo_ops.rotary_embedding(query, cosine, sine)
    assert all(tensor.shape == (5, 4) for tensor in saved)


def test_norm_of_half_precision_with_a_weight_in_float32():
    """The norm rounds once, at the end: the normalised row is not rounded before the weight."""
    input, weight = torch.randn(67, dtype=torch.bfloat16), torch.randn(67)
    exact = F.rms_norm(input.double(), (67,), weight.double(), 1e-6)
    assert foo_ops.rms_norm(input, weight).equal(exact.bfloat16())


MIXED_NORMS = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
]


@pytest.mark.parametrize(("of_input", "of_weight"), MIXED_NORMS, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_layer_norms_have_the_dtype_of_torch(of_input, of_weight, autocast, device):
    input = torch.randn(3, 67, dtype=of_input, device=device)
    weight, bias = torch.randn(2, 67, dtype=of_weight, device=device)
    with torch.autocast(device, enabled=autocast):
        expected = F.layer_norm(input, (67,), weight, bias)
        found = foo_ops.layer_norm(input, weight, bias)
    assert found.dtype == expected.dtype
    input, weight, bias = (it.cpu().double() for it in (input, weight, bias))
    assert_near(found, F.layer_norm(input, (67,), weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norms_of_numbers_whose_squares_overflow(dtype):
    input = (1e30 * torch.randn(3, 67)).to(dtype).requires_grad_()
    wide, cotangent = input.detach().double().requires_grad_(), torch.randn(3, 67).to(dtype)
    found, exact = foo_ops.layer_norm(input), F.layer_norm(wide, (67,))
    gradients = [
        torch.autograd.grad(output, of, cotangent.to(output))[0]
        for output, of in ((found, input), (exact, wide))
    ]
    assert_near(found.detach(), exact.detach())
    assert_near(*gradients)


def test_layer_norms_of_numbers_that_differ_in_their_last_digits(device):
    """The mean of a million is rounded to 0.06, a fifth of the standard deviation."""
    input = 1e6 + 0.3 * torch.randn(5, 1001, device=device)
    exact = F.layer_norm(input.cpu().double(), (1001,))
    assert_near(foo_ops.layer_norm(input), exact)


def test_layer_norms_of_equal_numbers(device):
    """A variance is never less than 0, also after the roundings of long sums."""
    input = torch.linspace(1000, 3000, 10, device=device)[:, None].expand(-1, 100_001)
    assert foo_ops.layer_norm(input, eps=1e-12).abs().max() < 1e-2
    with_infinity = torch.tensor([[1.0, torch.inf], [torch.nan, 1.0], [1.0, 3.0]], device=device)
    found = foo_ops.layer_norm(with_infinity).isnan().all(-1)
    assert found.tolist() == [True, True, False]
