"""foo::abs handles all dtypes, special values, in place, out= and layouts."""

import itertools
import math
import warnings

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from support.parts import whole

import foo_ops
from foo_ops import library
from foo_ops.ops.abs import of_real

pytestmark = pytest.mark.usefixtures("one_thread")


REAL_TYPES = tuple(of_real.variants)


COMPLEX_TYPES = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


FLOAT8 = [dtype for dtype in REAL_TYPES if "float8" in str(dtype)]


UNSIGNED = [dtype for dtype in REAL_TYPES if "uint" in str(dtype)]


SIGNED = [dtype for dtype in REAL_TYPES if ".int" in str(dtype)]


FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def bits(tensor):
    """Return the bits as integers, so that -0 differs from 0."""
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    )


@pytest.mark.parametrize("dtype", SIGNED, ids=str)
def test_signed_integers_and_the_one_without_a_positive(dtype, device):
    info = torch.iinfo(dtype)
    x = torch.tensor([info.min, info.min + 1, -7, -1, 0, 1, info.max], dtype=dtype)
    expected = torch.tensor([info.min, info.max, 7, 1, 0, 1, info.max], dtype=dtype)
    assert torch.equal(foo_ops.abs(x.to(device)).cpu(), expected)


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_unsigned_integers_are_their_own_absolute_value(dtype, device):
    x = torch.tensor([0, 1, 127, 128, torch.iinfo(dtype).max], dtype=dtype)
    result = foo_ops.abs(x.to(device))
    assert result.dtype == dtype
    assert torch.equal(result.cpu(), x)
    assert result.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOAT8], ids=str)
def test_every_value_of_the_small_formats(dtype, device):
    patterns = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    x = patterns.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)
    result = foo_ops.abs(x.to(device)).cpu()
    assert result.dtype == dtype
    expected = x.double().abs()
    assert torch.equal(result.double().nan_to_num(-1), expected.nan_to_num(-1))
    zeros = bits(result)[expected == 0]
    assert (zeros == 0).all()
    assert zeros.numel() == (1 if "fnuz" in str(dtype) else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_floats_lose_their_sign_and_nothing_else(dtype, device):
    info = torch.finfo(dtype)
    values = [0.0, info.tiny, info.tiny / 2, info.max, 1.0, math.inf, math.nan]
    x = torch.tensor([*values, *(-value for value in values)] * 5, dtype=dtype)
    result = foo_ops.abs(x.to(device)).cpu()
    assert torch.equal(bits(result), bits(torch.tensor(values * 10, dtype=dtype)))


@pytest.mark.parametrize(("dtype", "part"), COMPLEX_TYPES.items(), ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_modulus_of_all_magnitudes(dtype, part, device):
    """Squares overflow and underflow here; the reference is libm's hypot in float64."""
    info = torch.finfo(part)
    smallest = info.smallest_normal * info.eps
    magnitudes = [0.0, smallest, 3 * smallest, info.tiny, 1e3 * info.tiny, math.sqrt(info.tiny)]
    magnitudes += [info.eps, 0.75, 1.0, 3.0, 4.0, math.sqrt(info.max), info.max / 2, info.max]
    magnitudes += [math.inf, math.nan]
    if part == torch.float64:
        magnitudes += [2.0**exponent for exponent in (-451, -450, -449, 499, 500, 501, 510, 512)]
    signed = [sign * magnitude for magnitude in magnitudes for sign in (1, -1)]
    pairs = torch.tensor(list(itertools.product(signed, repeat=2)), dtype=part)
    x = torch.view_as_complex(pairs)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(np.hypot(*pairs.double().numpy().T))
    result = foo_ops.abs(x.to(device)).cpu()
    assert result.dtype == part
    rounded = expected.to(part)
    error = (result.double() - rounded.double()).abs()
    spacing = (rounded.double() * info.eps).clamp(min=smallest)
    same = (result == rounded) | (result.isnan() & rounded.isnan()) | (error <= spacing)
    assert same.all(), (x[~same], result[~same], rounded[~same])


def test_bool_and_quantized_numbers_are_refused(device):
    with pytest.raises(
        TypeError, match="abs: input must have an integer, floating-point or complex"
    ):
        foo_ops.abs(torch.tensor([True], device=device))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_lazy_conjugation_and_negation(dtype, device):
    x = torch.randn(7, dtype=dtype).to(device)
    assert torch.equal(foo_ops.abs(x.conj()), foo_ops.abs(x))
    negative = x.conj().imag
    assert negative.is_neg()
    assert torch.equal(foo_ops.abs(negative), foo_ops.abs(x.imag))


MEMORY = {
    "contiguous": torch.randn(2, 3, 4, 5),
    "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels last 3d": torch.randn(2, 3, 4, 5, 2).contiguous(memory_format=torch.channels_last_3d),
    "transposed": torch.randn(5, 4, 3).permute(1, 2, 0),
    "sliced": torch.randn(9, 8)[1::2, ::3],
    "offset": torch.randn(100)[3:],
    "expanded": torch.randn(5, 1).expand(5, 4),
    "expanded 0-d": torch.randn(()).expand(3, 4),
    "overlapping": torch.randn(10).as_strided((4, 4), (2, 1)),
    "size 1 with odd strides": torch.randn(4).as_strided((1, 4, 1), (77, 1, 5)),
    "empty": torch.randn(0, 3),
    "empty, transposed": torch.randn(2, 0, 3).permute(2, 1, 0),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_format_is_that_of_torch(name, device):
    """Values and strides equal torch's, and the fake kernel gives the same strides."""
    x = MEMORY[name]
    expected = torch.abs(x)
    with_layout = x.to(device) if name.startswith(("con", "chan", "empty")) else None
    if with_layout is None:
        storage = x.untyped_storage().nbytes() // 4
        whole = x.as_strided((storage,), (1,), 0).to(device)
        with_layout = whole.as_strided(x.shape, x.stride(), x.storage_offset())
    result = foo_ops.abs(with_layout)
    assert torch.equal(result.cpu(), expected)
    assert result.stride() == expected.stride()
    with torch._subclasses.FakeTensorMode() as mode:
        fake = foo_ops.abs(mode.from_tensor(with_layout))
    assert fake.stride() == expected.stride()


layouts = strategies.lists(strategies.integers(0, 6), max_size=5).flatmap(
    lambda shape: strategies.tuples(
        strategies.just(shape),
        strategies.permutations(range(len(shape))),
        strategies.lists(strategies.integers(1, 3), min_size=len(shape), max_size=len(shape)),
        strategies.integers(0, 3),
    )
)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    layout=layouts,
    dtype=strategies.sampled_from([torch.float32, torch.int8, torch.bfloat16, torch.complex64]),
    device_type=strategies.sampled_from(["cpu", "foo"]),
)
def test_any_shape_and_strides(layout, dtype, device_type):
    """Permuted dimensions, steps and offsets work as with torch's own operators."""
    shape, order, steps, offset = layout
    sizes = [size * step for size, step in zip(shape, steps)]
    whole = torch.arange(-offset, math.prod(sizes), dtype=torch.float32).mul(-1).to(dtype)

    def view(base):
        steps_of_each = tuple(slice(None, None, step) for step in steps)
        return base[offset:].view(sizes)[steps_of_each].permute(order)

    result = foo_ops.abs(view(whole.to(device_type)))
    assert torch.equal(result.cpu(), torch.abs(view(whole)))
    # torch.abs of complex numbers is an exception among torch's elementwise operators.
    assert result.stride() == torch.neg(view(whole)).stride()


@pytest.mark.parametrize("dtype", [*REAL_TYPES], ids=str)
def test_in_place(dtype, device):
    values = torch.tensor([-3, -1, 0, 2, 4]).to(dtype)
    x = values.to(device)
    assert torch.ops.foo.abs_(x) is x
    expected = torch.ops.foo.abs(values)
    assert torch.equal(x.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_in_place_on_a_view_writes_nothing_beside_it(device):
    base = torch.full((6, 6), -1.0, device=device)
    torch.ops.foo.abs_(base[1:5:2, ::3])
    expected = torch.full((6, 6), -1.0)
    expected[1:5:2, ::3] = 1
    assert torch.equal(base.cpu(), expected)


@pytest.mark.parametrize("dtype", COMPLEX_TYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_in_place_refuses_complex(dtype, device):
    x = torch.tensor([3 + 4j], dtype=dtype, device=device)
    with pytest.raises(TypeError, match="abs_: input must have an integer or floating-point dtype"):
        torch.ops.foo.abs_(x)


def test_in_place_refuses_memory_that_overlaps_itself(device):
    x = torch.full((1,), -1.0, device=device)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.ops.foo.abs_(x.expand(3))
    assert x.item() == -1


def test_in_place_in_parallel(device):
    x = torch.randn(3, 50_001, device=device)
    expected = x.cpu().abs()
    torch.set_num_threads(2)
    torch.ops.foo.abs_(x)
    assert torch.equal(x.cpu(), expected)


def test_out_is_returned_and_its_memory_is_used(device):
    x = torch.randn(4, 5, device=device)
    out = torch.empty(4, 5, device=device)
    address = out.data_ptr()
    assert foo_ops.abs(x, out=out) is out
    assert out.data_ptr() == address
    assert torch.equal(out.cpu(), x.cpu().abs())


@pytest.mark.parametrize("shape", [(0,), (2, 3), (6, 2)])
def test_out_is_resized(shape, device, capfd):
    """A non-empty `out` brings torch's warning, which torch.ops prints until torch 2.13."""
    x = torch.randn(4, 5, device=device)
    out = torch.empty(shape, device=device)
    warned = out.numel() > 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        foo_ops.abs(x, out=out)
    assert torch.equal(out.cpu(), x.cpu().abs())
    message = "An output with one or more elements was resized"
    warning = capfd.readouterr().err + "".join(str(each.message) for each in caught)
    assert warning.count(message) == warned


def test_out_keeps_its_strides(device):
    x = torch.randn(4, 5, device=device)
    base = torch.full((5, 9), 7.0, device=device)
    out = base[:, 1::2].t()
    foo_ops.abs(x, out=out)
    assert out.stride() == (2, 9)
    assert torch.equal(out.cpu(), x.cpu().abs())
    assert (base[:, ::2] == 7).all()


@pytest.mark.parametrize(
    ("input_type", "out_type"),
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float16),
        (torch.int32, torch.float32),
        (torch.uint8, torch.int64),
        (torch.complex64, torch.float64),
        (torch.complex64, torch.complex64),
        (torch.float32, torch.complex64),
    ],
    ids=str,
)
def test_out_of_another_dtype(input_type, out_type, device):
    x = torch.tensor([-3, 0, 2, 5], device=device).to(input_type)
    out = torch.empty(0, dtype=out_type, device=device)
    assert foo_ops.abs(x, out=out) is out
    assert out.dtype == out_type
    assert torch.equal(out.cpu(), x.cpu().abs().to(out_type))


@pytest.mark.parametrize(
    ("input_type", "out_type"),
    [(torch.float32, torch.int64), (torch.float64, torch.bool), (torch.complex64, torch.int32)],
    ids=str,
)
def test_out_refuses_a_dtype_of_a_lower_kind(input_type, out_type, device):
    out = torch.zeros(3, dtype=out_type, device=device)
    with pytest.raises(TypeError, match=r"abs: out must have a dtype that .* can be cast to, got"):
        foo_ops.abs(torch.ones(3, dtype=input_type, device=device), out=out)
    assert not out.any()


def test_out_may_be_the_input(device):
    x = torch.randn(100, device=device)
    expected = x.cpu().abs()
    foo_ops.abs(x, out=x)
    assert torch.equal(x.cpu(), expected)


def test_out_refuses_memory_that_partly_overlaps(device):
    base = torch.full((10,), -1.0, device=device)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        foo_ops.abs(base[:-1], out=base[1:])
    with pytest.raises(RuntimeError, match="unsupported operation"):
        foo_ops.abs(torch.ones(3, 4, device=device), out=base[:4].expand(3, 4))
    assert (base == -1).all()


def test_out_on_another_device_is_refused():
    for input_device, out_device in itertools.permutations(["cpu", "foo:0", "foo:1"], 2):
        out = torch.zeros(3, device=out_device)
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            foo_ops.abs(torch.ones(3, device=input_device), out=out)
        assert not out.any()


@pytest.mark.parametrize("overload", ["abs_", "abs.out"])
def test_opcheck_of_variants(overload, device):
    x, out = torch.randn(4, 5).to(device), torch.zeros(4, 5, device=device)
    if overload == "abs_":
        results = library.opcheck(torch.ops.foo.abs_.default, (x,))
    else:
        results = library.opcheck(torch.ops.foo.abs.out, (x,), {"out": out})
    assert results == dict.fromkeys(results, "SUCCESS")
    assert len(results) == 4


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", ["foo", *whole("cpu")])
def test_compiled_variants(dynamic, device):
    def function(x, out):
        y = x * 2
        torch.ops.foo.abs_(y[1:])
        torch.ops.foo.abs.out(y - 1, out=out)
        return y + out

    backend = "inductor" if device == "cpu" else "aot_eager"
    graph = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    for size in (5, 8) if dynamic else (5,):
        x = torch.linspace(-2, 1, size * 3).view(size, 3).to(device)
        outs = [torch.zeros(size, 3, device=device) for _ in range(2)]
        assert torch.equal(graph(x, outs[0]), function(x, outs[1]))
        assert torch.equal(*outs)
