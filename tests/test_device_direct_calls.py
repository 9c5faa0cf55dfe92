"""Operators that run on the CPU's kernels without the fallback, where their arguments allow it."""

import operator

import pytest
import torch
import torch.nn.functional as F

BINARY = {
    "add": ("aten::add.Tensor", operator.add),
    "add_alpha": ("aten::add.Tensor", lambda a, b: torch.add(a, b, alpha=2)),
    "mul": ("aten::mul.Tensor", operator.mul),
    "add_": ("aten::add_.Tensor", lambda a, b: a.add_(b, alpha=3)),
    "mul_": ("aten::mul_.Tensor", lambda a, b: a.mul_(b)),
}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)


def numbers(*shape, dtype=torch.float32):
    values = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(len(shape)))
    return values.to(dtype)


def on_foo(tensor):
    """With the same strides."""
    size, stride = tensor.size(), tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device="foo:1").copy_(tensor)


def check(name, actual, expected, kind):
    """That the results are the same and the operator ran once, on that kind of kernel."""
    for one, other in zip(actual, expected):
        assert one.device == torch.device("foo:1")
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one.cpu(), other)
    count = torch.foo.operator_counts()[name]
    assert count == ((1, 0) if kind == "own" else (0, 1))


# Two operands on the CPU, and what foo runs them on.
OPERANDS = {
    "same_shape": lambda dtype: (numbers(3, 40, dtype=dtype), numbers(3, 40, dtype=dtype)),
    "broadcast": lambda dtype: (numbers(3, 40, dtype=dtype), numbers(40, dtype=dtype)),
    "zero_dimensions": lambda dtype: (numbers(3, dtype=dtype), numbers(dtype=dtype)),
    "strided": lambda dtype: (
        numbers(9, 6, dtype=dtype).t()[::2],
        numbers(3, 18, dtype=dtype)[:, ::2],
    ),
    "empty": lambda dtype: (numbers(0, 3, dtype=dtype), numbers(3, dtype=dtype)),
    "large": lambda dtype: (numbers(300, 300, dtype=dtype), numbers(300, 300, dtype=dtype)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("name", BINARY)
def test_operands_of_one_dtype(name, operands, dtype):
    operator_name, function = BINARY[name]
    cpu = OPERANDS[operands](dtype)
    foo = [on_foo(tensor) for tensor in cpu]
    torch.foo.reset_operator_counts()
    actual, expected = function(*foo), function(*cpu)
    check(operator_name, [actual, *foo], [expected, *cpu], "own")


@pytest.mark.parametrize("name", BINARY)
def test_what_must_be_converted_goes_through_the_fallback(name):
    operator_name, function = BINARY[name]
    for other in (numbers(3, dtype=torch.int32), numbers(3, dtype=torch.bfloat16), 2):
        cpu = numbers(4, 3)
        foo = cpu.to("foo:1")
        there = other.to("foo:1") if isinstance(other, torch.Tensor) else other
        torch.foo.reset_operator_counts()
        actual, expected = function(foo, there), function(cpu, other)
        check(operator_name, [actual, foo], [expected, cpu], "fallback")


def test_a_number_on_the_cpu_goes_through_the_fallback():
    foo, cpu = numbers(3).to("foo:1"), numbers(3)
    torch.foo.reset_operator_counts()
    actual = foo * torch.tensor(2.0)
    check("aten::mul.Tensor", [actual], [cpu * 2], "fallback")


REFUSED = {
    "shapes": (lambda a: a + a[:, :2], "must match the size of tensor b"),
    "shape_in_place": (lambda a: a[0].clone().add_(a), "doesn't match the broadcast shape"),
    "overlap_inside": (lambda a: a[:1].expand(4, 3).mul_(a), "refers to a single memory location"),
    "overlap": (lambda a: a[1:].add_(a[:-1]), "refer to a single memory location"),
    "device": (lambda a: a + a.to("foo:0"), "at least two devices, foo:1 and foo:0!"),
    "cpu": (lambda a: a.mul_(a.cpu()), "at least two devices, foo:1 and cpu!"),
    "weight": (lambda a: F.layer_norm(a, (3,), torch.ones(3)), "got weight is on cpu"),
    "alpha": (lambda a: torch.add(a.long(), a.long(), alpha=0.5), "alpha must not be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_cpu_refuses_is_refused(case):
    function, message = REFUSED[case]
    tensor = numbers(4, 3).to("foo:1")
    before = tensor.cpu()
    with pytest.raises(RuntimeError, match=message):
        function(tensor)
    assert torch.equal(tensor.cpu(), before)


def test_versions_and_gradients():
    for function in (lambda a, b: (a * b + b).mul_(a), lambda a, b: (a * 1).add_(b).mul(b)):
        gradients = []
        for device in ("cpu", "foo:1"):
            a, b = (numbers(4, 3).double().to(device).requires_grad_() for _ in range(2))
            gradients.append(torch.autograd.grad(function(a, b).square().sum(), (a, b)))
        assert all(torch.equal(one, other.cpu()) for one, other in zip(*gradients))
    tensor = torch.ones(3, device="foo", requires_grad=True)
    saved = tensor * tensor.exp()
    kept = tensor.exp()
    loss = (kept * kept).sum()
    kept.add_(saved.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(dtype, affine):
    """A weight in float32 beside an input in bfloat16, too."""
    results = []
    for device in ("cpu", "foo:1"):
        input = numbers(6, 5, 8).transpose(0, 1).to(device, dtype).requires_grad_()
        leaves = [input]
        if affine:
            leaves += [(numbers(8) + k).to(device).requires_grad_() for k in range(2)]
        torch.foo.reset_operator_counts()
        output = F.layer_norm(input, (8,), *leaves[1:])
        gradients = torch.autograd.grad(output.float().square().sum(), leaves)
        results.append((output.detach(), *gradients))
    for expected, actual in zip(*results):
        assert actual.device == torch.device("foo:1")
        assert actual.stride() == expected.stride()
        assert torch.equal(actual.cpu(), expected)
    counts = torch.foo.operator_counts()
    assert counts["aten::native_layer_norm"] == (1, 0)
    assert counts["aten::native_layer_norm_backward"] == (1, 0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_zero(dtype):
    """A part of a tensor goes through the fallback, and the rest of it keeps its values."""
    views = {
        "own": (torch.t, lambda t: t[1:], lambda t: t[:0], lambda t: t[0, 0]),
        "fallback": (lambda t: t.t()[1:], lambda t: t[:, 0], lambda t: t[:, 1:3]),
    }
    for kind, functions in views.items():
        for view_of in functions:
            cpu = torch.ones(3, 4, dtype=dtype)
            foo = cpu.to("foo:1")
            torch.foo.reset_operator_counts()
            view = view_of(foo)
            assert view.zero_() is view
            view_of(cpu).zero_()
            assert torch.equal(foo.cpu(), cpu)
            assert getattr(torch.foo.operator_counts()["aten::zero_"], kind) == 1
    large = torch.ones(1 << 20, dtype=dtype, device="foo").zero_()
    assert not large.any()


def test_results_lie_in_memory_of_their_device():
    tensor = torch.ones(1000, device="foo:1")
    held = [torch.foo.memory_allocated(index) for index in range(2)]
    result = tensor + tensor
    assert torch.foo.memory_allocated(0) == held[0]
    assert torch.foo.memory_allocated(1) == held[1] + 4032
    result.mul_(tensor).add_(tensor)
    assert torch.foo.memory_allocated(1) == held[1] + 4032
    del result
    assert torch.foo.memory_allocated(1) == held[1]
