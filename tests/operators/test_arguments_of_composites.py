"""Composites, as run in forward mode, refuse the arguments that their operator refuses."""

import pytest
import torch
from torch import Tensor

import foo_ops

HIDDEN, WEIGHT = torch.randn(4, 8), torch.randn(6, 8)
TARGET = torch.tensor([0, 1, 2, 3])
INT8 = foo_ops.quantize_weight(WEIGHT, 8)
WIDE = torch.randn(4, 64)
MXFP4 = foo_ops.quantize_mxfp4(torch.randn(6, 64))
INT4 = foo_ops.quantize_weight(torch.randn(6, 64), 4, 32)
linear, silu_mul = foo_ops.linear, foo_ops.linear_silu_mul
of_hidden, of_logits = foo_ops.linear_cross_entropy, foo_ops.softmax_cross_entropy

CALLS = {
    "bias of one": lambda x: linear(x, WEIGHT, torch.randn(1)),
    "bias without dimensions": lambda x: linear(x, WEIGHT, torch.tensor(1.0)),
    "weight of one dimension": lambda x: linear(x, WEIGHT[0]),
    "width": lambda x: linear(x, WEIGHT[:, :3]),
    "weight of another dtype": lambda x: linear(x, WEIGHT.double()),
    "complex weight": lambda x: linear(x, WEIGHT.to(torch.complex64)),
    "activation": lambda x: linear(x, WEIGHT, activation="tan"),
    "up of another shape": lambda x: silu_mul(x, WEIGHT, WEIGHT[:1]),
    "scale of one": lambda x: foo_ops.linear_int8(x, INT8[0], INT8[1][:1]),
    "int8 of one dimension": lambda x: foo_ops.linear_int8(x, INT8[0][0], INT8[1]),
    "rows of gate and up": lambda x: foo_ops.linear_silu_mul_quantized(x, INT8[0][:5], INT8[1][:5]),
    "group size": lambda x: foo_ops.linear_int4(WIDE * x[0, 0], *INT4, group_size=64),
    "group size of zero": lambda x: foo_ops.linear_int4(WIDE * x[0, 0], *INT4, group_size=0),
    "mxfp4 with a row less": lambda x: foo_ops.linear_mxfp4(WIDE * x[0, 0], MXFP4[0], MXFP4[1][:5]),
    "mxfp4 with scales of numbers": lambda x: foo_ops.linear_mxfp4(
        WIDE * x[0, 0], MXFP4[0], MXFP4[1].float()
    ),
    "table of 15": lambda x: foo_ops.linear_table4(
        WIDE * x[0, 0], MXFP4[0], torch.ones(6, 2), torch.ones(15)
    ),
    "zero of another dtype": lambda x: foo_ops.linear_int4(
        WIDE * x[0, 0], INT4[0], INT4[1], INT4[2].int(), group_size=32
    ),
    "smoothing": lambda x: of_hidden(x, WEIGHT, TARGET, label_smoothing=7.0),
    "softcap": lambda x: of_hidden(x, WEIGHT, TARGET, softcap=-1.0),
    "fewer targets": lambda x: of_hidden(x, WEIGHT, TARGET[:3], reduction="none"),
    "target of int32": lambda x: of_logits(x, TARGET.int()),
    "target of probabilities": lambda x: of_logits(x, torch.rand(4, 8, requires_grad=True)),
    "targets that require a gradient": lambda x: of_hidden(
        x, WEIGHT, torch.rand(4, 6, requires_grad=True)
    ),
    "smoothing of logits": lambda x: of_logits(x, TARGET, label_smoothing=-3.0),
    "logits of float8": lambda x: of_logits((x * 1).to(torch.float8_e4m3fn), TARGET),
}


def error_of(call, x):
    with pytest.raises((ValueError, TypeError)) as caught:
        call(x)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode(name):
    call = CALLS[name]
    expected = error_of(call, HIDDEN)
    pushed = error_of(lambda x: torch.func.jvp(call, (x,), (torch.ones_like(x),)), HIDDEN)
    assert pushed == expected
    recorded = error_of(call, HIDDEN.clone().requires_grad_())
    assert recorded == expected


TENSORS = {
    "linear: input": lambda: torch.ops.foo.linear(None, WEIGHT),
    "linear: weight": lambda: torch.ops.foo.linear(HIDDEN, None),
    "linear_int8: scale": lambda: torch.ops.foo.linear_int8(HIDDEN, INT8[0], None),
    "silu_mul: up": lambda: torch.ops.foo.silu_mul(HIDDEN, None),
    "linear_cross_entropy: target": lambda: of_hidden(HIDDEN, WEIGHT, None),
    "attention: query": lambda: foo_ops.attention(None, *HIDDEN.expand(2, 1, 1, 4, 8)),
    "attention: value": lambda: foo_ops.attention(*HIDDEN.expand(2, 1, 1, 4, 8), None),
    "cache_append: key_cache": lambda: foo_ops.cache_append(
        None, *HIDDEN.expand(3, 1, 1, 4, 8), torch.tensor([0])
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_none_for_a_tensor(name):
    with pytest.raises(TypeError, match=rf"\A{name} must be a Tensor, got None\Z"):
        TENSORS[name]()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_caches_of_what_kernels_do_not_read(dtype, device):
    key_cache, value_cache, key, value = torch.zeros(4, 1, 1, 4, 8, device=device).to(dtype)
    name = str(dtype).removeprefix("torch.")
    wanted = (
        r"\Acache_append: key_cache must be float16, bfloat16, float32, float64, integers or bool, "
        rf"got {name}\Z"
    )
    with pytest.raises(TypeError, match=wanted):
        foo_ops.cache_append(
            key_cache, value_cache, key, value, torch.zeros(1, dtype=torch.int64, device=device)
        )


@pytest.mark.parametrize(
    ("name", "gradient", "logsumexp"),
    [
        ("logsumexp", torch.tensor(1.0), torch.ones(4, dtype=torch.int32)),
        ("grad_mean", torch.tensor(1.0, dtype=torch.float16), torch.ones(4)),
    ],
)
def test_sums_of_another_dtype(name, gradient, logsumexp):
    wrong = {"logsumexp": logsumexp, "grad_mean": gradient}[name]
    got = str(wrong.dtype).removeprefix("torch.")
    wanted = (
        rf"\Asoftmax_cross_entropy_backward: {name} must be float32 where logits is float32, "
        rf"got {got}\Z"
    )
    with pytest.raises(TypeError, match=wanted):
        torch.ops.foo.softmax_cross_entropy_backward(
            None, None, gradient, HIDDEN, TARGET, logsumexp
        )


# ------------------------------------------------------------------------------ what is right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_recorded_calls_under_autocast(dtype, device):
    x = HIDDEN.to(device)
    weight = torch.nn.Parameter(torch.randn(8, 8, device=device))

    def outputs(y: Tensor, of: Tensor) -> list[Tensor]:
        return [linear(y, of, activation="silu"), silu_mul(y, of, of)]

    with torch.autocast(device, dtype=dtype):
        # Such as the output of an earlier layer.
        y = linear(x, weight)
        found = outputs(y, weight)
        with torch.no_grad():
            unrecorded = outputs(y, weight)
    for one, other in zip(found, unrecorded):
        assert one.dtype == dtype
        exact = other.double().cpu()
        # Recorded operators round each product once more.
        bound = 4 * torch.finfo(dtype).eps * float(exact.abs().max())
        torch.testing.assert_close(one.double().cpu(), exact, rtol=0, atol=bound)
    sum(it.float().sum() for it in found).backward()
    assert weight.grad.dtype == torch.float32
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("reduction", ["mean", "none", "sum"])
def test_losses_of_single_rows_are_mapped(mapped, reduction):
    """Per-sample gradients; the target of a single row has no dimensions."""
    target = torch.tensor([0, 5, -100, 3])

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return of_hidden(hidden, WEIGHT, target, reduction=reduction)

    def pick(index: int) -> tuple[Tensor, Tensor]:
        return (
            HIDDEN[index if mapped[0] == 0 else 0], target[index if mapped[1] == 0 else 0]
        )  # fmt: skip

    given = (HIDDEN if mapped[0] == 0 else HIDDEN[0], target if mapped[1] == 0 else target[0])
    gradient = torch.func.grad(loss)
    for function in (loss, gradient):
        found = torch.vmap(function, in_dims=mapped)(*given)
        expected = torch.stack([function(*pick(index)) for index in range(4)])
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("function", "input", "others"),
    [(of_logits, torch.randn(3, 0), ()), (of_hidden, HIDDEN[:3], (torch.randn(0, 8),))],
)
def test_no_classes_where_all_rows_are_ignored(function, input, others):
    target = torch.full((3,), -100)

    def loss(x: Tensor) -> Tensor:
        return function(x, *others, target, reduction="sum")

    x = input.clone().requires_grad_()
    assert [it.item() for it in torch.func.jvp(loss, (input,), (input,))] == [0.0, 0.0]
    first = torch.autograd.grad(loss(x), x, create_graph=True)[0]
    assert not first.any()
    assert not torch.autograd.grad(first.sum(), x)[0].any()


def pushed(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.func.jvp(lambda x: linear(x, WEIGHT), (x,), (torch.cos(x),))


def test_graphs_of_any_size():
    """Arguments are checked while sizes are symbols."""
    compiled = torch.compile(pushed, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), pushed(x))


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.devices = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.devices |= {it.device.type for it in (result,) if isinstance(it, Tensor)}
        return result


def test_modes_see_no_tensors_without_data():
    with Counting() as counting:
        pushed(HIDDEN)
    assert counting.devices == {"cpu"}
