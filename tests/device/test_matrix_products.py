"""Matrix products on foo: torch's operators, computed by foo::linear."""

import pytest
import torch
from support.exact import assert_near
from torch import nn

ROUNDINGS = 64
"""Roundings of the largest result; the 300 terms of a sum may cancel."""
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [(1, 1, 1), (3, 5, 7), (0, 5, 7), (3, 0, 7), (3, 5, 0), (1, 300, 200), (200, 300, 1),
         (65, 130, 67), (128, 300, 256)]  # fmt: skip


@pytest.fixture(autouse=True)
def from_nothing():
    torch.foo.reset_operator_counts()


def own(name):
    """Return how often an operator ran on foo's kernel; check that it never ran on the CPU's."""
    count = torch.foo.operator_counts()[f"aten::{name}"]
    assert count.fallback == 0
    return count.own


def random(*shape, dtype=torch.float32, layout="contiguous"):
    """Return random numbers on foo, and the same in float64 on the CPU."""
    generator = torch.Generator().manual_seed(sum(shape))
    *batch, rows, columns = shape if len(shape) > 1 else (1, *shape)
    if layout == "transposed":
        made = torch.randn(*batch, columns, rows, generator=generator).mT
    elif layout == "steps":
        made = torch.randn(*batch, 2 * rows, 3 * columns, generator=generator)[..., ::2, ::3]
    elif layout == "expanded":
        made = torch.randn(*batch, rows, 1, generator=generator).expand(*batch, rows, columns)
    else:
        made = torch.randn(*batch, rows, columns, generator=generator)
    made = made if len(shape) > 1 else made[0]
    # The strides on foo are those on the CPU.
    foo = torch.empty_strided(made.size(), made.stride(), dtype=dtype, device="foo")
    foo.copy_(made) if layout != "expanded" else foo[..., :1].copy_(made[..., :1])
    return foo, foo.cpu().double()


LAYOUTS = [("contiguous", "contiguous"), ("transposed", "steps"), ("steps", "transposed"),
           ("expanded", "expanded")]  # fmt: skip


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mm(dtype, layouts):
    for rows, depth, columns in SIZES:
        left, exact_left = random(rows, depth, dtype=dtype, layout=layouts[0])
        right, exact_right = random(depth, columns, dtype=dtype, layout=layouts[1])
        result = left @ right
        assert result.dtype == dtype
        assert result.is_contiguous()
        assert_near(result, exact_left @ exact_right, roundings=ROUNDINGS)
    assert own("mm") == len(SIZES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias(dtype):
    for rows, depth, columns in SIZES:
        left, exact_left = random(rows, depth, dtype=dtype)
        weight, exact_weight = random(columns, depth, dtype=dtype)
        for shape in ((columns,), (1, columns), (1,), ()):
            bias = torch.randn(shape, dtype=dtype)
            result = torch.addmm(bias.foo(), left, weight.t())
            exact = bias.double() + exact_left @ exact_weight.t()
            assert_near(result, exact, roundings=ROUNDINGS)
    assert own("addmm") == 4 * len(SIZES)


FACTORS = [(1, 1), (0.5, -2), (0, 1), (2, 0), (0, 0), (1, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factors", FACTORS)
def test_sums_of_matrices(factors, dtype):
    """In half precision the CPU's kernel computes sums, unless nothing is added."""
    beta, alpha = factors
    for rows, depth, columns in SIZES:
        left, exact_left = random(rows, depth, dtype=dtype)
        right, exact_right = random(depth, columns, dtype=dtype, layout="transposed")
        added, exact_added = random(rows, columns, dtype=dtype, layout="steps")
        exact = beta * exact_added + alpha * (exact_left @ exact_right)
        options = {"beta": beta, "alpha": alpha}
        out = torch.empty(columns, rows, dtype=dtype, device="foo").t()
        for result in (
            torch.addmm(added, left, right, **options),
            added.clone().addmm_(left, right, **options),
            torch.addmm(added, left, right, out=out, **options),
        ):
            assert_near(result, exact, roundings=ROUNDINGS)
    if dtype in (torch.float32, torch.float64) or factors == (0, 1):
        assert own("addmm") == own("addmm_") == own("addmm.out") == len(SIZES)
    elif factors != (1, 1):
        assert torch.foo.operator_counts()["aten::addmm"].own == 0


def test_what_counts_nothing_is_not_read():
    left, right = torch.randn(3, 4, device="foo"), torch.randn(4, 5, device="foo")
    nothing = torch.full((3, 5), torch.nan, device="foo")
    assert torch.addmm(nothing, left, right, beta=0).isfinite().all()
    assert torch.addmm(nothing, left, right).isnan().all()
    left[1, 2] = torch.inf
    result = left @ right
    assert result[0].isfinite().all()
    assert not result[1].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors(dtype):
    for rows, columns in ((1, 1), (5, 7), (0, 3), (3, 0), (300, 200)):
        for layout in ("contiguous", "transposed", "steps"):
            matrix, exact = random(rows, columns, dtype=dtype, layout=layout)
            vector, exact_vector = random(2 * columns, dtype=dtype)
            vector, exact_vector = vector[::2], exact_vector[::2]
            added, exact_added = random(rows, dtype=dtype)
            assert_near(matrix.mv(vector), exact.mv(exact_vector), roundings=ROUNDINGS)
            result, out = torch.addmv(added, matrix, vector), torch.empty_like(added)
            torch.addmv(added, matrix, vector, out=out)
            assert result.shape == out.shape == (rows,)
            for it in (result, out, added.clone().addmv_(matrix, vector)):
                assert_near(it, exact_added + exact.mv(exact_vector), roundings=ROUNDINGS)
    assert own("addmv") == own("addmv.out") == 15


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "steps"])
def test_batches(dtype, layout):
    """Large products of most dtypes run on our kernel, small ones on the CPU's; all are right."""
    for batch, rows, depth, columns in (
        (0, 3, 4, 5), (3, 0, 4, 5), (3, 4, 0, 5), (2, 3, 4, 5), (3, 40, 50, 60), (3, 200, 190, 230)
    ):  # fmt: skip
        left, exact_left = random(batch, rows, depth, dtype=dtype, layout=layout)
        right, exact_right = random(batch, depth, columns, dtype=dtype)
        added, exact_added = random(batch, rows, columns, dtype=dtype)
        exact, out = exact_left @ exact_right, torch.empty_like(added)
        assert_near(torch.bmm(left, right), exact, roundings=ROUNDINGS)
        assert_near(torch.bmm(left, right, out=out), exact, roundings=ROUNDINGS)
        exact = 0.5 * exact_added - 2 * exact
        result = torch.baddbmm(added, left, right, beta=0.5, alpha=-2)
        assert_near(result, exact, roundings=ROUNDINGS)
        assert_near(added.baddbmm_(left, right, beta=0.5, alpha=-2), exact, roundings=ROUNDINGS)
    count = torch.foo.operator_counts()["aten::bmm"].own
    assert count == {torch.bfloat16: 0, torch.float16: 2}.get(dtype, 1)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_batches_on_threads(threads):
    """Gradients are recorded outside of the multiplying threads, never inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left = torch.randn(5, 128, 300, device="foo", requires_grad=True)
        right = torch.randn(5, 300, 256, device="foo", requires_grad=True)
        (left @ right).square().sum().backward()
    finally:
        torch.set_num_threads(before)
    one, other = (it.detach().cpu().double().requires_grad_() for it in (left, right))
    (one @ other).square().sum().backward()
    assert own("bmm") == 3
    assert_near(left.grad, one.grad)
    assert_near(right.grad, other.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_train(dtype):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(20, 33), nn.Linear(33, 7, bias=False)).to(dtype)
    twin = nn.Sequential(nn.Linear(20, 33), nn.Linear(33, 7, bias=False)).double()
    twin.load_state_dict(layers.state_dict())
    foo, x = layers.foo(), torch.randn(2, 5, 20, dtype=dtype)
    foo(x.foo()).sum().backward()
    twin(x.double()).sum().backward()
    for ours, theirs in zip(foo.parameters(), twin.parameters()):
        assert_near(ours.grad, theirs.grad, roundings=64)
    assert own("mm") + own("addmm") >= 5


def test_second_derivatives():
    left = torch.randn(3, 4, dtype=torch.float64, device="foo", requires_grad=True)
    right = torch.randn(4, 5, dtype=torch.float64, device="foo", requires_grad=True)
    added = torch.randn(5, dtype=torch.float64, device="foo", requires_grad=True)
    assert torch.autograd.gradgradcheck(torch.addmm, (added, left, right))


# ---------------------------------------------------------------- what is left to torch's kernels


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.int8])
def test_other_dtypes(dtype):
    left, right = torch.ones(3, 4, dtype=dtype), torch.ones(4, 5, dtype=dtype)
    assert torch.equal((left.foo() @ right.foo()).cpu(), left @ right)
    assert torch.foo.operator_counts()["aten::mm"] == (0, 1)


def test_a_result_over_an_operand():
    """The CPU's kernel computes it, which reads elements that it has already written."""
    square = torch.randn(4, 4)
    foo = square.foo()
    assert torch.equal(torch.mm(foo, foo, out=foo).cpu(), torch.mm(square, square, out=square))
    assert torch.foo.operator_counts()["aten::mm.out"] == (0, 1)


def test_a_result_over_what_is_added():
    added, left, right = (torch.randn(4, 4, device="foo") for _ in range(3))
    exact = added.cpu().double() + left.cpu().double() @ right.cpu().double()
    assert_near(torch.addmm(added, left, right, out=added), exact)


def test_an_empty_result_grows():
    out = torch.empty(0, device="foo")
    left, right = torch.randn(3, 4, device="foo"), torch.randn(4, 5, device="foo")
    assert torch.mm(left, right, out=out) is out
    torch.testing.assert_close(out, left @ right)


WRONG = {
    "sizes": lambda d: torch.mm(torch.ones(3, 4, device=d), torch.ones(3, 4, device=d)),
    "dimensions": lambda d: torch.mm(torch.ones(3, device=d), torch.ones(3, 4, device=d)),
    "dtypes": lambda d: torch.ones(3, 3, device=d) @ torch.ones(3, 3, device=d).double(),
    "bias": lambda d: torch.addmm(
        torch.ones(2, device=d), torch.ones(3, 4, device=d), torch.ones(4, 5, device=d)
    ),
    "batches": lambda d: torch.bmm(torch.ones(3, 4, 5, device=d), torch.ones(2, 5, 4, device=d)),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_torch_s(name):
    errors = []
    for device in ("cpu", "foo"):
        with pytest.raises(RuntimeError) as caught:
            WRONG[name](device)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


# --------------------------------------------------------------------------------------- the choice


def test_products_of_the_cpu(products_of_cpu):
    assert torch.foo.get_matmul_kernels() == "cpu"
    left, right = torch.randn(129, 300), torch.randn(300, 65)
    assert torch.equal((left.foo() @ right.foo()).cpu(), left @ right)
    assert torch.foo.operator_counts()["aten::mm"] == (0, 1)


def test_wrong_kernels():
    message = r"^set_matmul_kernels: kernels must be foo or cpu, got 'gpu'$"
    with pytest.raises(ValueError, match=message):
        torch.foo.set_matmul_kernels("gpu")
    assert torch.foo.get_matmul_kernels() == "foo"


@pytest.mark.needs_compiler
def test_compiled(fresh_compiler):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 48).foo(), torch.randn(7, 64).foo()
    result = torch.compile(lambda it: layer(it).relu())(x)
    exact = x.cpu().double() @ layer.weight.cpu().double().t() + layer.bias.cpu().double()
    assert_near(result.detach(), exact.detach().relu())
