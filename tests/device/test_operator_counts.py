"""torch.foo.operator_counts gives the kernels that operators ran on."""

import threading

import pytest
import torch
import torch.nn.functional as F

import foo_ops


@pytest.fixture(autouse=True)
def from_nothing():
    torch.foo.reset_operator_counts()


def test_own_kernels_and_the_fallback():
    tensor = torch.ones(4, device="foo")
    torch.foo.reset_operator_counts()
    assert torch.foo.operator_counts() == {}
    for _ in range(3):
        (tensor + 1).view(2, 2)
    assert torch.foo.operator_counts() == {
        "aten::add.Tensor": (0, 3),
        "aten::view": (3, 0),
    }
    assert torch.foo.operator_counts()["aten::view"].own == 3
    assert torch.foo.operator_counts()["aten::add.Tensor"].fallback == 3


def test_the_cpu_does_not_count():
    torch.ones(3).add(1).view(3, 1)
    torch.ops.foo.abs(torch.ones(3))
    assert torch.foo.operator_counts() == {}


def test_foo_s_own_operators():
    torch.ops.foo.abs(torch.ones(3, device="foo"))
    assert torch.foo.operator_counts()["foo::abs"] == (1, 0)


def own_operators():
    """Return the package's operators with a kernel for the device; tests define others."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    return {name for name in names if name.startswith(("foo::abs", "foo::attention", "foo::flex"))}


def squared(score, b, h, q_idx, kv_idx):
    return score * score


def test_each_of_foo_s_own_operators_counts():
    input = torch.rand(3, device="foo")
    out = torch.empty(3, device="foo")
    heads = torch.randn(1, 2, 5, 8, device="foo", requires_grad=True)
    packed = torch.randn(5, 2, 8, device="foo", requires_grad=True)
    starts = torch.tensor([0, 5], dtype=torch.int32, device="foo")
    bias = torch.zeros(5, 5, device="foo", requires_grad=True)
    lengths = {"max_seqlen_q": 5, "max_seqlen_k": 5}
    cache = torch.ones(1, 2, 5, 8, dtype=torch.int8, device="foo")
    scales = torch.ones(1, 2, 5, device="foo")
    torch.foo.reset_operator_counts()

    input.requires_grad_()
    (first,) = torch.autograd.grad(torch.ops.foo.abs(input).sum(), input, create_graph=True)
    first.sum().backward()
    input.requires_grad_(False)
    torch.ops.foo.abs_(input)
    torch.ops.foo.abs.out(input, out=out)
    with torch.no_grad():
        torch.ops.foo.attention(heads, heads, heads)
        torch.ops.foo.attention_int8_cache(heads, cache, cache, scales, scales)
        torch.ops.foo.attention_varlen(packed, packed, packed, starts, starts, **lengths)
    output, _ = torch.ops.foo.attention(heads, heads, heads, bias, dropout_p=0.5)
    (first,) = torch.autograd.grad(output.square().sum(), heads, create_graph=True)
    first.sum().backward()
    output, _ = torch.ops.foo.attention_varlen(packed, packed, packed, starts, starts, **lengths)
    output.sum().backward()
    foo_ops.flex_attention(heads, heads, heads, squared).sum().backward()
    both = (packed, packed, packed, starts, starts)
    foo_ops.flex_attention_varlen(*both, squared, **lengths).sum().backward()

    counts = {name: count for name, count in torch.foo.operator_counts().items() if "foo::" in name}
    assert counts.keys() == own_operators()
    # With gradients, the operator that takes a seed runs in place of the one that draws it.
    once = {"abs", "abs_", "abs.out", "attention_int8_cache"}
    once |= {f"attention{form}{seeded}" for form in ("", "_varlen") for seeded in ("", "_seeded")}
    for name in once:
        assert counts[f"foo::{name}"] == (1, 0)
    assert all(count.fallback == 0 for count in counts.values())


def test_attention_has_kernels_of_its_own():
    query = torch.randn(1, 2, 5, 8, device="foo", requires_grad=True)
    F.scaled_dot_product_attention(query, query, query).sum().backward()
    counts = torch.foo.operator_counts()
    for name in ("", "_backward"):
        assert counts[f"aten::_scaled_dot_product_fused_attention_overrideable{name}"] == (1, 0)
    for name in ("seeded", "backward"):
        assert counts[f"foo::attention_{name}"] == (1, 0)
    assert not any("softmax" in name for name in counts)


def test_a_list_counts_once():
    tensors = [torch.ones(size, device="foo") for size in (2, 3)]
    torch.foo.reset_operator_counts()
    torch._foreach_mul_(tensors, 2)
    assert torch.foo.operator_counts() == {"aten::_foreach_mul_.Scalar": (0, 1)}


def test_operators_that_come_and_go():
    """A new operator may have the address of a former one."""
    tensor = torch.ones(1, device="foo")
    torch.foo.reset_operator_counts()
    for number in range(20):
        with torch.library._scoped_library("foo_count", "FRAGMENT") as library:
            library.define(f"passing{number}(Tensor x) -> Tensor")
            library.impl(f"passing{number}", torch.clone, "CPU")
            getattr(torch.ops.foo_count, f"passing{number}")(tensor)
    counts = torch.foo.operator_counts()
    assert [counts[f"foo_count::passing{number}"] for number in range(20)] == [(0, 1)] * 20


def test_a_refused_call_does_not_count():
    with torch.library._scoped_library("foo_count", "FRAGMENT") as library:
        library.define("nothing(Tensor x) -> Tensor")
        tensor = torch.ones(1, device="foo")
        with pytest.raises(NotImplementedError):
            torch.ops.foo_count.nothing(tensor)
    assert "foo_count::nothing" not in torch.foo.operator_counts()


def test_threads_count_together():
    tensor = torch.ones(4, device="foo")
    torch.foo.reset_operator_counts()

    def run():
        for _ in range(200):
            tensor.neg()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.foo.operator_counts()["aten::neg"] == (0, 800)
