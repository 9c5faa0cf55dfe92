"""torch.nn.functional.scaled_dot_product_attention on foo runs on foo's own attention kernels."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from support.exact import assert_near
from support.fused_attention import Operators, expected_of, heads_in_front, on_foo, some_keys
from support.versions import TORCH
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from foo_ops.testing import reference

pytestmark = pytest.mark.usefixtures("one_thread")

FUSED_OPERATOR = "aten::_scaled_dot_product_fused_attention_overrideable"

FUSED = "aten._scaled_dot_product_fused_attention_overrideable.default"

FUSED_BACKWARD = "aten._scaled_dot_product_fused_attention_overrideable_backward.default"

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Shapes of query, key and value, then options.
CALLS = {
    "no options": ((2, 3, 70, 16), (2, 3, 70, 16), (2, 3, 70, 16), {}),
    "causal": ((2, 3, 9, 8), (2, 3, 12, 8), (2, 3, 12, 8), {"is_causal": True}),
    "scale": ((1, 1, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8), {"scale": -0.2}),
    "value_dim": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 24), {}),
    "groups": ((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    "bool_mask": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"attn_mask": some_keys(5, 7)}),
    "blind_rows": (
        (1, 2, 3, 8),
        (1, 2, 7, 8),
        (1, 2, 7, 8),
        {"attn_mask": torch.tensor([[True], [False], [True]]).expand(3, 7)},
    ),
    "float_mask": (
        (2, 6, 5, 8),
        (2, 3, 7, 8),
        (2, 3, 7, 8),
        {"attn_mask": torch.randn(6, 1, 7, dtype=torch.float64), "enable_gqa": True},
    ),
    "mask_and_causal": (
        (1, 2, 6, 8),
        (1, 2, 6, 8),
        (1, 2, 6, 8),
        {"attn_mask": torch.randn(2, 1, 6, 6, dtype=torch.float64)[:1, 0], "is_causal": True},
    ),
    "no_queries": ((2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 8), {}),
    "no_keys": ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8), {}),
}
if TORCH >= (2, 14):
    # Refused on every device.
    del CALLS["mask_and_causal"]


@pytest.fixture(params=CALLS)
def example(request):
    torch.manual_seed(0)
    *shapes, options = CALLS[request.param]
    return [heads_in_front(*shape) for shape in shapes], dict(options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(example, dtype):
    tensors, options = example
    inputs = [on_foo(tensor, dtype) for tensor in tensors]
    leaves = list(inputs)
    if "attn_mask" in options:
        mask = options["attn_mask"] = on_foo(options["attn_mask"], dtype)
        leaves += [mask] if mask.requires_grad else []
    with Operators() as operators:
        output = F.scaled_dot_product_attention(*inputs, **options)
        cotangent = torch.randn(output.shape, dtype=torch.float64).to("foo", dtype)
        gradients = torch.autograd.grad(output, leaves, cotangent)
    # torch itself returns zeros if there is nothing to compute.
    is_empty = any(tensor.numel() == 0 for tensor in inputs)
    assert (FUSED in operators.names) != is_empty
    assert (FUSED_BACKWARD in operators.names) != is_empty
    assert output.dtype == dtype
    expected, expected_gradients = expected_of(inputs, options, cotangent)
    assert_near(output.detach(), expected.detach())
    for leaf, actual, expected in zip(leaves, gradients, expected_gradients):
        assert actual.dtype == dtype
        assert is_empty or actual.stride() == torch.empty_like(leaf).stride()
        assert_near(actual, expected)


# Float64 inputs with 2 query heads of dimension 3 and 4 keys, then options.
SECOND_DERIVATIVES = {
    "no options": (2, {}),
    "causal": (2, {"is_causal": True, "scale": 0.7}),
    "groups": (1, {"enable_gqa": True}),
    "bool_mask": (2, {"attn_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]]) > 0}),
    "dropout": (2, {"dropout_p": 0.4}),
}


@pytest.mark.parametrize("case", SECOND_DERIVATIVES)
def test_second_derivatives(case):
    heads, options = SECOND_DERIVATIVES[case]
    torch.manual_seed(0)
    inputs = [on_foo(heads_in_front(1, *shape)) for shape in ((2, 3, 3), (heads, 4, 3))]
    inputs.append(on_foo(heads_in_front(1, heads, 4, 2)))
    if "attn_mask" in options:
        options = options | {"attn_mask": options["attn_mask"].to("foo")}

    def attend(*inputs):
        torch.foo.manual_seed(4)
        return F.scaled_dot_product_attention(*inputs, **options)

    with Operators() as operators:
        assert torch.autograd.gradgradcheck(attend, inputs)
    assert FUSED in operators.names


def test_second_derivatives_with_a_mask_that_has_some():
    torch.manual_seed(0)
    inputs = [on_foo(heads_in_front(1, 2, 3, 3)) for _ in range(3)]
    mask = torch.randn(1, 3, device="foo", dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(F.scaled_dot_product_attention, (*inputs, mask))


def test_second_derivatives_are_those_of_the_formula():
    """One tensor is query, key and value; the reference is torch's formula in float64."""
    torch.manual_seed(0)
    start, direction = torch.randn(2, 2, 3, 9, 8).double().unbind()

    def second(device, dtype, backend):
        tensor = start.to(device, dtype).requires_grad_()
        with sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(tensor, tensor, tensor, is_causal=True)
            (first,) = torch.autograd.grad(output.square().sum(), tensor, create_graph=True)
            return torch.autograd.grad(first, tensor, direction.to(device, dtype))[0]

    expected = second("cpu", torch.float64, SDPBackend.MATH)
    for dtype in (torch.float64, torch.float32):
        actual = second("foo", dtype, SDPBackend.OVERRIDEABLE)
        assert actual.dtype == dtype
        # Each element is a sum over 9 keys of sums over 8 elements.
        tolerance = 9 * 8 * torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=0, atol=tolerance)


def test_gradients_of_function_transforms():
    """Transforms record a graph, and so run operators that can be differentiated again."""
    query = torch.randn(1, 2, 5, 8, device="foo", dtype=torch.float64)

    def loss(query):
        return F.scaled_dot_product_attention(query, query, query).square().sum()

    with Operators() as operators:
        gradient = torch.func.grad(loss)(query)
        second = torch.func.jacrev(torch.func.grad(loss))(query)
    assert FUSED in operators.names
    assert "foo.attention_backward.default" in operators.names
    exact = query.cpu()
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.func.grad(loss)(exact), torch.func.hessian(loss)(exact)
    torch.testing.assert_close((gradient.cpu(), second.cpu()), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("value_dim", [8, 5])
def test_results_lie_in_memory_as_the_query(order, value_dim):
    """torch.compile relies on the meta kernel, which gives the same strides."""
    query = torch.empty_permuted((2, 3, 5, 8), order, device="foo").normal_()
    key, value = (
        torch.randn(2, 3, 7, 8, device="foo"),
        torch.randn(2, 3, 7, value_dim, device="foo"),
    )
    output = F.scaled_dot_product_attention(query, key, value)
    meta = torch.ops.aten._scaled_dot_product_fused_attention_overrideable(
        *(tensor.to("meta") for tensor in (query, key, value))
    )
    assert output.stride() == meta[0].stride()
    assert output.stride() == torch.empty_permuted((2, 3, 5, value_dim), order).stride()


def test_only_the_mask_needs_a_gradient():
    query, key, value = torch.randn(3, 1, 2, 5, 8, device="foo").unbind()
    mask = torch.zeros(5, 5, device="foo", requires_grad=True)
    F.scaled_dot_product_attention(query, key, value, mask).square().sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        twin = torch.zeros(5, 5, device="foo", requires_grad=True)
        F.scaled_dot_product_attention(query, key, value, twin).square().sum().backward()
    assert twin.grad.abs().max() > 0.01
    torch.testing.assert_close(mask.grad, twin.grad)


def test_float32_mask_beside_bfloat16():
    query, key, value = torch.randn(3, 1, 2, 5, 8, device="foo").bfloat16().unbind()
    mask = torch.randn(5, 5, device="foo", requires_grad=True)
    with Operators() as operators:
        output = F.scaled_dot_product_attention(query, key, value, mask)
    assert FUSED in operators.names
    cotangent = torch.ones_like(output)
    (gradient,) = torch.autograd.grad(output, mask, cotangent)
    _, expected = expected_of((query, key, value), {"attn_mask": mask}, cotangent)
    assert gradient.dtype == torch.float32
    assert_near(gradient, expected[3], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dropout(dtype):
    """The seed comes from foo's generator; forward and backward keep the same weights."""
    torch.manual_seed(5)
    inputs = [on_foo(heads_in_front(2, 2, 40, 8), dtype) for _ in range(3)]
    state = torch.foo.get_rng_state()
    output = F.scaled_dot_product_attention(*inputs, dropout_p=0.3)
    cotangent = torch.randn(output.shape, device="foo", dtype=dtype)
    gradients = torch.autograd.grad(output, inputs, cotangent)
    again = F.scaled_dot_product_attention(*inputs, dropout_p=0.3)
    assert not torch.equal(again, output)

    torch.foo.set_rng_state(state)
    assert torch.equal(F.scaled_dot_product_attention(*inputs, dropout_p=0.3), output)
    torch.foo.set_rng_state(state)
    seed = torch.randint(torch.iinfo(torch.int64).max, (1,), device="foo")
    keep = torch.ops.foo.attention_dropout_mask(
        seed, [2, 2, 40, 40], 0.3, dtype=torch.float64
    ).cpu()
    assert 0.6 < keep.mean() < 0.8
    expected, expected_gradients = expected_of(
        inputs, {}, cotangent, dropout_mask=keep.bool(), dropout_p=0.3
    )
    assert_near(output.detach(), expected.detach())
    for actual, expected in zip(gradients, expected_gradients):
        assert_near(actual, expected)


def test_nothing_is_drawn_without_dropout():
    query = torch.randn(1, 1, 4, 8, device="foo")
    state = torch.foo.get_rng_state()
    F.scaled_dot_product_attention(query, query, query)
    assert torch.equal(torch.foo.get_rng_state(), state)


def test_dropout_of_each_device():
    """The generator is that of the tensors' device, not of the current device."""
    query = torch.randn(1, 1, 4, 8, device="foo:1")
    states = torch.foo.get_rng_state_all()
    F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    after = torch.foo.get_rng_state_all()
    assert torch.equal(after[0], states[0])
    assert not torch.equal(after[1], states[1])


def test_checkpoint_drops_the_same_weights():
    inputs = [torch.randn(1, 2, 30, 8, device="foo", requires_grad=True) for _ in range(3)]

    def attend(*inputs):
        return F.scaled_dot_product_attention(*inputs, dropout_p=0.5)

    gradients = []
    for run in (attend, lambda *inputs: checkpoint(attend, *inputs, use_reentrant=False)):
        torch.manual_seed(3)
        gradients.append(torch.autograd.grad(run(*inputs).square().sum(), inputs))
    assert all(map(torch.equal, *gradients))


def test_large_head_dims_are_fused():
    query, key = torch.randn(2, 1, 2, 5, 300, dtype=torch.float64).unbind()
    with Operators() as operators:
        output = F.scaled_dot_product_attention(query.to("foo"), key.to("foo"), key.to("foo"))
    assert FUSED in operators.names
    expected, _ = reference.attention(query, key, key)
    assert_near(output, expected)


# Calls that foo's kernels do not take; torch's formula computes them.
NOT_FUSED = {
    "three_dimensions": (torch.float32, (3, 5, 8), (3, 7, 8), {}),
    "five_dimensions": (torch.float32, (2, 2, 3, 5, 8), (2, 2, 3, 7, 8), {}),
    "no_head_dim": (torch.float32, (1, 1, 5, 0), (1, 1, 5, 0), {}),
    "broadcast_batch": (torch.float32, (2, 1, 5, 8), (1, 1, 7, 8), {}),
    "all_dropped": (torch.float32, (1, 1, 5, 8), (1, 1, 5, 8), {"dropout_p": 1.0}),
}


@pytest.mark.parametrize("case", NOT_FUSED)
def test_falls_back_to_the_formula(case):
    dtype, query_shape, key_shape, options = NOT_FUSED[case]
    query, key = torch.randn(query_shape, dtype=dtype), torch.randn(key_shape, dtype=dtype)
    with Operators() as operators:
        output = F.scaled_dot_product_attention(
            query.to("foo"), key.to("foo"), key.to("foo"), **options
        )
    # Newer versions add a dimension to three-dimensional inputs.
    takes = case == "three_dimensions" and TORCH >= (2, 14)
    assert (FUSED in operators.names) == takes
    with sdpa_kernel(SDPBackend.MATH):
        exact = (tensor.double() for tensor in (query, key, key))
        expected = F.scaled_dot_product_attention(*exact, **options)
    assert_near(output, expected)


@pytest.mark.parametrize(
    ("backends", "is_fused"),
    [
        ([SDPBackend.OVERRIDEABLE], True),
        ([SDPBackend.MATH], False),
        ([SDPBackend.MATH, SDPBackend.OVERRIDEABLE], True),
        ([SDPBackend.FLASH_ATTENTION], None),
    ],
)
def test_context_managers(backends, is_fused):
    query = torch.randn(1, 2, 5, 8, device="foo")
    refusal = pytest.raises(RuntimeError, match="No viable backend for scaled_dot_product")
    with sdpa_kernel(backends), Operators() as operators:
        with refusal if is_fused is None else contextlib.nullcontext():
            F.scaled_dot_product_attention(query, query, query)
        assert (FUSED in operators.names) == bool(is_fused)


def test_choice_operator():
    query = torch.randn(1, 2, 5, 8, device="foo")
    assert torch._fused_sdp_choice(query, query, query) == SDPBackend.OVERRIDEABLE.value
    assert torch._fused_sdp_choice(query[0], query[0], query[0]) == SDPBackend.MATH.value


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_compiled(dynamic, dtype):
    """Compiled and eager functions agree in dropout, gradients and strides."""

    def attend(query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=0.2)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (5, 6, 9):
        inputs = [on_foo(heads_in_front(2, 3, length, 8), dtype) for _ in range(3)]
        inputs.append(torch.randn(length, length, device="foo", dtype=dtype, requires_grad=True))
        results = []
        for run in (attend, compiled):
            torch.manual_seed(1)
            output = run(*inputs)
            results.append((output, *torch.autograd.grad(output.square().sum(), inputs)))
        for one, other in zip(*results):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_with_a_context_manager():
    query = torch.randn(1, 2, 5, 8, device="foo")

    def attend(query):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, query, query)

    torch.foo.reset_operator_counts()
    result = torch.compile(attend, backend="eager", fullgraph=True)(query)
    assert "aten::bmm" in torch.foo.operator_counts()
    assert FUSED_OPERATOR not in torch.foo.operator_counts()
    exact = query.cpu().double()
    assert_near(result, reference.attention(exact, exact, exact)[0])


def test_vmap():
    query, key, value = torch.randn(3, 4, 1, 2, 5, 8, device="foo").unbind()
    mask = torch.randn(5, 5, device="foo")
    exact = [tensor.cpu().double() for tensor in (query, key, value, mask)]
    expected = [reference.attention(*each, exact[3])[0] for each in zip(*exact[:3])]
    result = torch.vmap(F.scaled_dot_product_attention, in_dims=(0, 0, 0, None))(
        query, key, value, mask
    )
    assert_near(result, torch.stack(expected))


def test_autocast():
    query = torch.randn(1, 2, 5, 8, device="foo", requires_grad=True)
    with torch.autocast("foo", dtype=torch.bfloat16), Operators() as operators:
        output = F.scaled_dot_product_attention(query, query, query)
    assert FUSED in operators.names
    assert output.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(output.sum(), query)
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("position", [1, 2])
def test_tensors_of_other_devices_raise(position):
    tensors = [torch.randn(1, 2, 5, 8, device="foo") for _ in range(3)]
    tensors[position] = tensors[position].cpu()
    with pytest.raises(RuntimeError, match="to have the same device type"):
        F.scaled_dot_product_attention(*tensors)
