"""The table of products that PyTorch's kernels compute: its routes, and the values."""

import pytest
import torch
import torch.nn.functional as F
from support.exact import assert_near
from support.processes import python
from torch.profiler import ProfilerActivity, profile

import foo_ops
from foo_ops import _C
from foo_ops.kernels.compiler.processor import has_matrix_unit
from foo_ops.testing import reference

EVENT = "foo::linear by aten::mm"
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
# Other families of Intel take the same routes.
FAMILIES = ("amd-avx2", "amd-bfloat16", "intel-amx")
HAS_MKL = torch.backends.mkl.is_available()
# PyTorch sums in float32 and rounds to bfloat16 once. MKL adds other dtypes' sums to a large bias.
ROUNDINGS = {torch.bfloat16: 2, torch.float32: 32, torch.float64: 32}
WIDTH, OUTPUTS = 768, 640
INTEL = ("intel-avx2", "intel-avx512", "intel-bfloat16", "intel-amx")


@pytest.fixture(params=FAMILIES)
def family(request):
    """Use another processor's rows of the table: PyTorch's kernels exist on all of them."""
    before = _C.set_torch_products(request.param)
    yield request.param
    _C.set_torch_products(before)


# ------------------------------------------------------------------------------------------ table


@pytest.mark.parametrize(
    ("vendor", "features", "expected"),
    [
        ("amd", "", "none"),
        ("amd", "avx2", "amd-avx2"),
        ("amd", "avx2 avx512", "none"),
        ("amd", "avx2 avx512 bfloat16_dot", "amd-bfloat16"),
        ("intel", "", "none"),
        ("intel", "avx2", "intel-avx2"),
        ("intel", "avx2 avx512", "intel-avx512"),
        ("intel", "avx2 avx512 bfloat16_dot", "intel-bfloat16"),
        ("intel", "avx2 avx512 bfloat16_dot matrix_unit", "intel-amx"),
        ("other", "avx2 avx512 bfloat16_dot matrix_unit", "none"),
    ],
)
def test_family_of_a_processor(vendor, features, expected):
    has = dict.fromkeys(features.split(), True)
    assert _C.product_family(getattr(_C.Vendor, vendor), **has) == expected


def forms_of(family, dtype, rows, work=1 << 30):
    """Return the forms that the table assigns to PyTorch's kernels."""
    return {
        form
        for form in _C.PRODUCT_FORMS
        if _C.is_quicker_by_torch(family, dtype, form, rows=rows, work=work)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", INTEL)
def test_intel(family, dtype):
    """MKL computes all large products, in each form; few rows only where it is faster."""
    everything, gradients = set(_C.PRODUCT_FORMS), {"grad_input", "grad_weight"}
    least = 256 if dtype == torch.float64 else 9 if family == "intel-avx2" else 64
    for rows in (9, 63, 64, 255, 256, 1 << 20):
        forms = everything if rows >= least else gradients
        assert forms_of(family, dtype, rows) == forms
    assert forms_of(family, dtype, 8) == forms_of(family, dtype, 64, work=1 << 20) == set()


@pytest.mark.parametrize("family", INTEL)
def test_intel_in_bfloat16(family):
    """oneDNN computes the gradients of weights of few rows on a matrix unit."""
    for rows in (8, 9, 128, 129, 1024):
        is_torchs = family == "intel-amx" and rows in (9, 128)
        forms = {"grad_weight"} if is_torchs else set()
        assert forms_of(family, torch.bfloat16, rows) == forms


@pytest.mark.parametrize(
    ("family", "dtype", "rows", "forms"),
    [
        ("amd-bfloat16", torch.bfloat16, 8, ""),
        ("amd-bfloat16", torch.bfloat16, 9, "grad_input grad_weight"),
        ("amd-bfloat16", torch.bfloat16, 16, "grad_input grad_weight"),
        ("amd-bfloat16", torch.bfloat16, 32, "grad_input grad_weight"),
        ("amd-bfloat16", torch.bfloat16, 128, "forward grad_input grad_weight"),
        ("amd-bfloat16", torch.bfloat16, 256, "forward bias grad_input grad_weight"),
        ("amd-bfloat16", torch.float32, 1024, ""),
        ("amd-avx2", torch.bfloat16, 1024, ""),
        ("amd-avx2", torch.float32, 255, ""),
        ("amd-avx2", torch.float32, 256, "forward bias grad_input"),
        ("amd-avx2", torch.float32, 512, "forward bias grad_input grad_weight"),
        ("amd-avx2", torch.float64, 512, "forward bias grad_input"),
        ("none", torch.float32, 1024, ""),
    ],
)
def test_amd(family, dtype, rows, forms):
    assert forms_of(family, dtype, rows) == set(forms.split())
    assert forms_of(family, torch.float16, rows) == set()


def test_names_of_families():
    with pytest.raises(ValueError, match=r"^FOO_TORCH_PRODUCTS must be 0, 1 or one of none, .*amx"):
        _C.set_torch_products("intel")


# ----------------------------------------------------------------------------- routes and values


def tensors(rows, dtype, device):
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, WIDTH), (OUTPUTS, WIDTH), (rows, OUTPUTS))
    input, weight, gradient = (torch.randn(it, generator=generator).to(dtype) for it in shapes)
    return (it.to(device) for it in (input, weight / WIDTH**0.5, gradient))


def forward(input, weight, gradient):
    return foo_ops.linear(input, weight), lambda: input.double() @ weight.double().mT


def one_block(input, weight, gradient):
    return forward(input, weight[:200], gradient)


def bias_of(gradient):
    """Return every third number of a row as the bias, scaled to exceed the sums."""
    return 8 * torch.cat((gradient, gradient, gradient), 1)[0, ::3]


def bias(input, weight, gradient):
    result = foo_ops.linear(input, weight, bias_of(gradient))
    return result, lambda: F.linear(*(it.double() for it in (input, weight, bias_of(gradient))))


def activation(input, weight, gradient):
    result = foo_ops.linear(input, weight, bias_of(gradient), activation="gelu")
    return result, lambda: F.gelu(bias(input, weight, gradient)[1]())


def gate(input, weight, gradient):
    up = weight.roll(1, 0)
    result = foo_ops.linear_silu_mul(input, weight, up)
    return (
        result,
        lambda: F.silu(input.double() @ weight.double().mT) * (input.double() @ up.double().mT),
    )


def grad_input(input, weight, gradient):
    result = torch.ops.foo.linear_backward(gradient, input, weight, weight_requires_grad=False)
    return result[0], lambda: gradient.double() @ weight.double()


def grad_weight(input, weight, gradient):
    result = torch.ops.foo.linear_backward(gradient, input, weight, input_requires_grad=False)
    return result[1], lambda: gradient.double().mT @ input.double()


def by_torch(function):
    """Return the function's result, and the number of products that PyTorch computed."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        result = function()
    return result, sum(it.count for it in seen.key_averages() if it.key == EVENT)


PRODUCTS = (forward, bias, activation, gate, grad_input, grad_weight)


@pytest.mark.parametrize("rows", [8, 24, 1100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_route_and_values(family, rows, dtype, device):
    """Each product takes the route that the table gives, and matches float64."""
    given = tuple(tensors(rows, dtype, device))
    size = {"rows": rows, "work": rows * WIDTH * OUTPUTS}
    for product in PRODUCTS:
        (result, exact), count = by_torch(lambda product=product: product(*given))
        is_torchs = _C.is_quicker_by_torch(family, dtype, product.__name__, **size)
        assert count == int(is_torchs and (HAS_MKL or dtype == torch.bfloat16)), product.__name__
        assert_near(result.cpu(), exact().cpu(), roundings=ROUNDINGS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_in_the_table(family, dtype, device):
    input, weight, gradient = tensors(256, dtype, device)
    assert by_torch(lambda: forward(input[:, :8], weight[:, :8], gradient))[1] == 0
    assert by_torch(lambda: forward(input.half(), weight.half(), gradient))[1] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_strides(family, dtype, device):
    """Gradients that are expanded or stored by columns give correct results."""
    input, weight, gradient = tensors(256, dtype, device)
    for grad in (gradient[:1].expand(256, -1), gradient.t().contiguous().t(), gradient):
        results = torch.ops.foo.linear_backward(grad, input.flip(0), weight)
        exact = grad.double() @ weight.double(), grad.double().mT @ input.flip(0).double()
        for result, expected in zip(results, exact):
            assert_near(result.cpu(), expected.cpu(), roundings=ROUNDINGS[dtype])


def skip_sums_of_threads(family, dtype):
    if (family, dtype) == ("amd-bfloat16", torch.bfloat16) and has_matrix_unit():
        pytest.skip("on a matrix unit, oneDNN's order of sums depends on the number of threads")


@pytest.mark.parametrize("rows", [24, 256, 1100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_result_for_every_number_of_threads(family, rows, dtype):
    skip_sums_of_threads(family, dtype)
    given = tuple(tensors(rows, dtype, "cpu"))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([it(*given)[0] for it in (*PRODUCTS, one_block)])
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


def grouped(input, weight, gradient):
    """Compute products of groups of 24, 0, 3, 300 and all other rows, and their gradients."""
    groups = weight.unflatten(0, (5, OUTPUTS // 5))
    offsets = torch.tensor([24, 24, 27, 327, len(input)], device=input.device)
    bias, grad = groups[..., 0].contiguous(), gradient[:, : OUTPUTS // 5].contiguous()
    output = foo_ops.grouped_linear(input, groups, offsets, bias)
    gradients = torch.ops.foo.grouped_linear_backward(
        grad, input, groups, offsets, bias_requires_grad=True
    )

    def exact():
        leaves = [it.double().requires_grad_() for it in (input, groups, bias)]
        result = reference.grouped_linear(leaves[0], leaves[1], offsets, leaves[2])
        return result, *torch.autograd.grad(result, leaves, grad.double())

    return (output, *gradients), exact


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups(family, dtype):
    """Products of groups take the routes of the table as well, for any number of threads alike."""
    given = tuple(tensors(1100, dtype, "cpu"))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (2, 1, 3):
            torch.set_num_threads(threads)
            results.append(grouped(*given))
    finally:
        torch.set_num_threads(before)
    (first, exact), *others = results
    for result, expected in zip(first, exact()):
        assert_near(result, expected.detach(), roundings=ROUNDINGS[dtype])
    skip_sums_of_threads(family, dtype)
    for other, _ in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize(
    ("counts", "is_torchs"), [([24, 0, 300, 1024], False), ([24, 0, 1025], True)]
)
def test_gradients_of_groups(counts, is_torchs):
    """Ours are one loop; PyTorch computes those of weights of many tokens."""
    input, _, gradient = tensors(sum(counts), torch.bfloat16, "cpu")
    weight = torch.ones(len(counts), OUTPUTS, WIDTH, dtype=torch.bfloat16)
    before = _C.set_torch_products("amd-bfloat16")
    try:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            torch.ops.foo.grouped_linear_backward(
                gradient, input, weight, torch.tensor(counts).cumsum(0)
            )
    finally:
        _C.set_torch_products(before)
    events = {it.key for it in seen.key_averages()}
    assert ("foo::grouped_linear by aten::mm" in events) == is_torchs or has_matrix_unit()


SWITCHED_OFF = f"""
import torch
import foo_ops
from torch.profiler import profile

with profile() as seen:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        foo_ops.linear(*torch.ones(2, 512, 512, dtype=dtype).unbind())
assert {EVENT!r} not in [it.key for it in seen.key_averages()]
"""


@pytest.mark.parametrize("variable", ["FOO_TORCH_PRODUCTS", "FOO_BFLOAT16_PAIRS"])
def test_switched_off(variable):
    process = python(SWITCHED_OFF, **{variable: "0"})
    assert process.returncode == 0, process.stderr
