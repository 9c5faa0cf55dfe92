"""The elementwise launcher runs operators that are defined as a user defines them."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies
from support.exact import units_in_the_last_place
from torch._subclasses import FakeTensorMode

from foo_ops import language, library, testing

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16)
# Both devices share the kernel table.
DTYPE_NOT_USED_ELSEWHERE = {"cpu": torch.int32, "foo": torch.int8}


def minus_twice(a, b):
    """Compute an asymmetric function, so that swapped operands are noticed."""
    return a - 2 * b


NUMBERS = (*DTYPES, *DTYPE_NOT_USED_ELSEWHERE.values())
KERNELS = {
    "minus_twice": minus_twice,
    "exp2": lambda x: language.exp2(x),
    "exp": lambda x: language.exp(x),
    "tanh": lambda x: language.tanh(x),
    "log": lambda x: language.log(x),
    "gamma": lambda x: math.gamma(x),
}


def loses_the_gradient(input):
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.foo_test.detached(input)


@pytest.fixture(scope="module", autouse=True)
def operators():
    """Define foo_test::minus_twice in three variants, and other operators."""
    library.define("foo_test::detached", "(Tensor input) -> Tensor")
    implementation = torch.library.Library("foo_test", "IMPL")
    implementation.impl("detached", torch.clone, "CompositeExplicitAutograd")
    implementation.impl("detached", loses_the_gradient, "Autograd")
    for name, schema in {
        "minus_twice": "(Tensor a, Tensor b) -> Tensor",
        "minus_twice_": "(Tensor(a!) a, Tensor b) -> Tensor(a!)",
        "minus_twice.out": "(Tensor a, Tensor b, *, Tensor(a!) out) -> Tensor(a!)",
        "exp2": "(Tensor input) -> Tensor",
        "exp": "(Tensor input) -> Tensor",
        "tanh": "(Tensor input) -> Tensor",
        "log": "(Tensor input) -> Tensor",
        "gamma": "(Tensor input) -> Tensor",
    }.items():
        library.define(f"foo_test::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
        function = KERNELS[name.removesuffix(".out").removesuffix("_")]
        kernel = library.elementwise_kernel(function, dtypes=NUMBERS)
        library.register_kernel(f"foo_test::{name}", ("cpu", "foo"), kernel)
    # The library lives as long as this reference.
    return implementation


def numbers(shape, dtype):
    """Make small integers, which are exact in every dtype."""
    count = math.prod(shape)
    return (torch.arange(count) * 7 % 19 - 9).view(shape).to(dtype)


def check(a, b, device):
    """Compare values, dtype and strides with torch's own operators, and with the fake kernel."""
    operands = [testing.copy_with_layout(operand, device) for operand in (a, b)]
    result = torch.ops.foo_test.minus_twice(*operands)
    expected = a.add(b, alpha=-2)
    assert result.dtype == expected.dtype
    assert result.device.type == device
    assert torch.equal(result.cpu(), expected)
    assert result.stride() == expected.stride()
    with FakeTensorMode() as mode:
        fake = torch.ops.foo_test.minus_twice(*map(mode.from_tensor, operands))
    assert (fake.dtype, fake.shape, fake.stride()) == (result.dtype, result.shape, result.stride())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_keep_their_order(dtype, device):
    check(numbers((5, 7), dtype), numbers((5, 7), dtype).flip(0), device)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((5, 7), (7,)),
        ((7,), (5, 7)),
        ((5, 1), (1, 7)),
        ((), (5, 7)),
        ((2, 1, 3, 1), (4, 1, 5)),
        ((0, 3), (1, 3)),
        ((1,), ()),
        ((3, 1, 70_000), (2, 1)),
    ],
    ids=str,
)
def test_broadcasting(first, second, device):
    torch.set_num_threads(2)
    check(numbers(first, torch.float32), numbers(second, torch.float32), device)


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [
        (torch.float32, torch.float64, torch.float64),
        (torch.int64, torch.float16, torch.float16),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.int16, torch.int64, torch.int64),
        (torch.bool, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_promotion(first, second, result, device):
    a, b = numbers((4, 6), first), numbers((6,), second)
    assert torch.promote_types(first, second) == result
    check(a, b, device)
    check(b, a, device)


def test_promotion_of_scalars(device):
    """A tensor without dimensions decides the kind of the result's dtype, but not its width."""
    check(numbers((5,), torch.float16), torch.tensor(2.0, dtype=torch.float64), device)
    check(torch.tensor(2), numbers((5,), torch.bfloat16), device)
    check(numbers((5,), torch.int64), torch.tensor(2.0), device)


shapes = strategies.lists(strategies.integers(1, 5), max_size=4)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    shape=shapes,
    data=strategies.data(),
    device_type=strategies.sampled_from(["cpu", "foo"]),
)
def test_any_shapes_and_layouts(shape, data, device_type):
    operands = []
    for _ in range(2):
        kept = shape[data.draw(strategies.integers(0, len(shape))) :]
        sizes = [data.draw(strategies.sampled_from([1, size])) for size in kept]
        layout = data.draw(strategies.sampled_from([torch.clone, *testing.LAYOUTS]))
        dtype = data.draw(strategies.sampled_from([torch.float32, torch.float64]))
        operands.append(layout(numbers(sizes, dtype)))
    check(*operands, device_type)


def test_shapes_that_do_not_fit(device):
    with pytest.raises(
        RuntimeError, match=r"size of tensor a \(3\) must match the size of tensor b"
    ):
        torch.ops.foo_test.minus_twice(*(torch.ones(n, device=device) for n in (3, 4)))


def test_in_place(device):
    a, b = numbers((5, 7), torch.float32).to(device), numbers((7,), torch.float32).to(device)
    expected = a.cpu().sub(b.cpu(), alpha=2)
    assert torch.ops.foo_test.minus_twice_(a, b) is a
    assert torch.equal(a.cpu(), expected)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        torch.ops.foo_test.minus_twice_(b, a)


def test_in_place_with_itself(device):
    a = numbers((100,), torch.float32).to(device)
    expected = -a.cpu()
    torch.ops.foo_test.minus_twice_(a, a)
    assert torch.equal(a.cpu(), expected)


def test_out_may_be_either_input(device):
    for position in range(2):
        operands = [numbers((4, 50), torch.float32), numbers((4, 50), torch.float32).flip(0)]
        expected = operands[0].sub(operands[1], alpha=2)
        operands = [operand.to(device) for operand in operands]
        torch.ops.foo_test.minus_twice.out(*operands, out=operands[position])
        assert torch.equal(operands[position].cpu(), expected)


def test_opcheck(device):
    a, b = numbers((5, 1), torch.float32).to(device), numbers((7,), torch.float64).to(device)
    for operator, keywords in (
        (torch.ops.foo_test.minus_twice.default, {}),
        (torch.ops.foo_test.minus_twice.out, {"out": torch.zeros(5, 7, device=device).double()}),
    ):
        results = library.opcheck(operator, (a, b), keywords)
        assert results == dict.fromkeys(results, "SUCCESS")


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_for_dynamic_shapes(device):
    def function(a, b):
        return torch.ops.foo_test.minus_twice(a, b) + 1

    backend = "inductor" if device == "cpu" else "aot_eager"
    graph = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for rows, columns in ((5, 7), (9, 4)):
        a = numbers((rows, 1), torch.float32).to(device)
        b = numbers((columns,), torch.bfloat16).to(device)
        torch.testing.assert_close(graph(a, b), function(a, b), rtol=0, atol=0, check_stride=True)


for_each_compute_type = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@for_each_compute_type
def test_exp2(dtype):
    """Errors are at most 1.5 ulp; results below the normal numbers are zero."""
    lowest, highest = (-126, 127) if dtype == torch.float32 else (-1022, 1023)
    x = torch.linspace(lowest, highest, 300_001, dtype=torch.float64).to(dtype)
    actual = torch.ops.foo_test.exp2(x)
    assert units_in_the_last_place(actual, torch.exp2(x.double()), dtype) <= 1.5
    whole = torch.arange(lowest, highest, dtype=dtype)
    assert torch.equal(torch.ops.foo_test.exp2(whole), torch.exp2(whole.double()).to(dtype))
    special = torch.tensor([-math.inf, -1e30, lowest - 1.0, 0.0, math.nan], dtype=dtype)
    result = torch.ops.foo_test.exp2(special)
    assert result[:4].tolist() == [0, 0, 0, 1]
    assert result[4].isnan()


@for_each_compute_type
def test_exp(dtype):
    """Errors are at most 2 ulp, also for large x; beyond the range, zero and infinity."""
    lowest, highest = (-87.3, 88.7) if dtype == torch.float32 else (-708.3, 709.7)
    x = torch.linspace(lowest, highest, 300_001, dtype=torch.float64).to(dtype)
    actual = torch.ops.foo_test.exp(x)
    assert units_in_the_last_place(actual, torch.exp(x.double()), dtype) <= 2
    special = torch.tensor([-math.inf, -1e30, lowest * 1.2, 0.0, 1e30, math.inf], dtype=dtype)
    assert torch.ops.foo_test.exp(special).tolist() == [0, 0, 0, 1, math.inf, math.inf]
    assert torch.ops.foo_test.exp(torch.tensor(math.nan, dtype=dtype)).isnan()


@for_each_compute_type
def test_tanh(dtype):
    """Errors are at most 4 ulp, for small numbers too."""
    smallest = math.log2(torch.finfo(dtype).smallest_normal) + 1
    magnitudes = torch.exp2(torch.linspace(smallest, 6, 300_001, dtype=torch.float64)).to(dtype)
    x = torch.cat((magnitudes, -magnitudes))
    actual = torch.ops.foo_test.tanh(x)
    assert units_in_the_last_place(actual, torch.tanh(x.double()), dtype) <= 4
    special = torch.tensor([-math.inf, -1e30, -0.0, 0.0, 1e30, math.inf, math.nan], dtype=dtype)
    result = torch.ops.foo_test.tanh(special)
    assert result[:6].tolist() == [-1, -1, 0, 0, 1, 1]
    assert result[2:4].signbit().tolist() == [True, False]
    assert result[6].isnan()


@for_each_compute_type
def test_log(dtype):
    """Errors are at most 1 ulp, near one and for subnormal numbers too."""
    lowest, highest = (-149, 127.99) if dtype == torch.float32 else (-1074, 1023.99)
    powers = torch.linspace(lowest, highest, 300_001, dtype=torch.float64)
    near_one = torch.linspace(-1, 1, 100_001, dtype=torch.float64) ** 3
    x = torch.cat((torch.exp2(powers), 1 + near_one[1:])).to(dtype)
    actual, expected = torch.ops.foo_test.log(x), torch.log(x.double())
    assert units_in_the_last_place(actual[x != 1], expected[x != 1], dtype) <= 1
    special = torch.tensor([1.0, 0.0, -0.0, math.inf], dtype=dtype)
    assert torch.ops.foo_test.log(special).tolist() == [0, -math.inf, -math.inf, math.inf]
    assert torch.ops.foo_test.log(-x[:1000]).isnan().all()
    wrong = torch.tensor([-math.inf, math.nan], dtype=dtype)
    assert torch.ops.foo_test.log(wrong).isnan().all()


def floor(x):
    return math.floor(x)


def ceil(x):
    return math.ceil(x)


def trunc(x):
    return math.trunc(x)


def floor_divided(x):
    return x // 3


def enumerated(x):
    total = x * 0
    for index, value in enumerate((x, 2 * x)):
        total += index * value
    return total


def zipped(x):
    total = x * 0
    for first, second in zip((x, 2 * x), (x, x)):
        total += first * second
    return total


def with_closure(x):
    def twice(value):
        return 2 * value

    return twice(x) + twice(1.0)


@pytest.mark.parametrize(
    "function",
    [floor, ceil, trunc, floor_divided, enumerated, zipped, with_closure],
    ids=lambda function: function.__name__,
)
def test_python_that_a_kernel_may_use(function):
    """The compiler drops Python features for arrays and exceptions, but none of these."""
    name = f"foo_test::python_{function.__name__}"
    lib = library.Library("foo_test", "FRAGMENT")
    library.define(name, "(Tensor x) -> Tensor", lib=lib)
    library.register_kernel(name, ("cpu",), library.elementwise_kernel(function), lib=lib)
    x = torch.tensor([-7.5, -3.0, -0.25, 0.0, 2.75, 9.0])
    actual = getattr(torch.ops.foo_test, f"python_{function.__name__}")(x)
    assert actual.tolist() == [function(value) for value in x.tolist()]


def test_opcheck_sees_a_gradient_that_is_lost(device):
    """torch's own check accepts any kernel on the autograd key."""
    x = torch.randn(3, device=device, requires_grad=True)
    operator = torch.ops.foo_test.detached.default
    with pytest.raises(Exception, match="an input requires a gradient, but no output does"):
        library.opcheck(operator, (x,), test_utils="test_autograd_registration")
    result = library.opcheck(
        operator, (x,), test_utils="test_autograd_registration", raise_exception=False
    )
    assert "no output does" in str(result["test_autograd_registration"])
    assert library.opcheck(operator, (x.detach(),), test_utils="test_autograd_registration") == {
        "test_autograd_registration": "SUCCESS"
    }


def test_contiguous_tensors_are_cut_for_several_threads(device):
    """Each thread begins where the previous one ends, for elements of every size."""
    name = f"foo_elementwise::cut_{device}"
    library.define(name, "(Tensor a, Tensor b) -> (Tensor, Tensor)")

    @library.register_kernel(name, device)
    @library.elementwise_kernel(result_type=(None, torch.bool))
    def cut(a, b):
        return a - b, a > b

    torch.set_num_threads(3)
    a, b = torch.randn(2, 300_007, device=device)
    difference, is_greater = getattr(torch.ops.foo_elementwise, f"cut_{device}")(a, b)
    assert torch.equal(difference, a - b)
    assert torch.equal(is_greater, a > b)


def test_empty_tensors_need_no_kernel(device):
    """No kernel is compiled for them either; compiling would fail here."""
    name = f"foo_elementwise::wrong_{device}"
    library.define(name, "(Tensor a, Tensor b) -> Tensor")
    library.register_kernel(name, device, library.elementwise_kernel(lambda a, b: a.middle))
    call = getattr(torch.ops.foo_elementwise, f"wrong_{device}")
    empty = torch.ones(0, 3, device=device)
    assert call(empty, empty).shape == (0, 3)
    assert call(empty, empty[:, :1]).shape == (0, 3)
    with pytest.raises(RuntimeError, match="Unknown attribute 'middle'"):
        call(*torch.ones(2, 3, device=device))
