"""A tile kernel makes an operator from a function over arrays."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from foo_ops import language, library, testing
from foo_ops.ops.rms_norm import forward_kernel

pytestmark = pytest.mark.usefixtures("one_thread")


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


DEVICES = ("cpu", "foo")


def scaled_norm_vectors(input, weight, eps, output, rows):
    """Compute the norm of rms_norm with explicit vectors."""
    size, step = input.shape[-1], language.lanes(input)
    whole = size // step * step
    for row in rows:
        x, y = input.row(row), output.row(row)
        totals = language.splat(language.zero(input), step)
        for i in range(0, whole, step):
            value = language.load_vector(x, i, step)
            totals = language.fma(value, value, totals)
        total = language.reduce_add(totals)
        for i in range(whole, size):
            total += x[i] * x[i]
        scale = language.cast(1 / math.sqrt(total / size + eps), input)
        for i in range(size):
            value = x[i] * scale
            if weight is not None:
                value = value * weight[i]
            y[i] = value


def columns(input, sums, largest, tiles):
    """Take columns as tiles, without contiguous rows; return two results of different dtypes."""
    for column in tiles:
        total, maximum = language.zero(sums), language.cast(-math.inf, sums)
        for row in range(input.shape[0]):
            total += input[row, column]
            maximum = language.accumulate_maximum(maximum, input[row, column])
        sums[column] = total
        language.store(largest.data, column * largest.strides[0], maximum)


def add_scalars(input, a, b, flag, count, rows):
    """Add every kind of scalar in place."""
    for row in rows:
        x = input.row(row)
        for i in range(input.shape[-1]):
            if flag:
                x[i] = x[i] + a
            if b is not None:
                x[i] = x[i] + b
            if count is not None:
                x[i] = x[i] + count


@pytest.fixture(scope="module", autouse=True)
def operators():
    arguments = "Tensor input, Tensor? weight=None, *, float eps=1e-6"
    vectors = library.tile_kernel(scaled_norm_vectors, contiguous_rows=True)
    for name, kernel in {"norm": forward_kernel, "norm_v": vectors}.items():
        library.define(f"foo_tile::{name}", f"({arguments}) -> Tensor")
        library.define(f"foo_tile::{name}.out", f"({arguments}, Tensor(a!) out) -> Tensor(a!)")
        library.define(
            f"foo_tile::{name}_",
            "(Tensor(a!) input, Tensor? weight=None, *, float eps=1e-6) -> Tensor(a!)",
            tags=torch.Tag.inplace,
        )

        @library.register_fake(f"foo_tile::{name}")
        def norm_fake(input, weight=None, *, eps=1e-6):
            if weight is not None and weight.shape != input.shape[-1:]:
                raise ValueError(f"norm: weight must have shape {list(input.shape[-1:])}")
            return torch.empty_like(input, memory_format=torch.contiguous_format)

        @library.register_fake(f"foo_tile::{name}_")
        def norm_in_place_fake(input, weight=None, *, eps=1e-6):
            return input

        for form in ("", "_", ".out"):
            library.register_kernel(f"foo_tile::{name}{form}", DEVICES, kernel)
    library.define("foo_tile::columns", "(Tensor input) -> (Tensor, Tensor)")

    @library.register_fake("foo_tile::columns")
    def columns_fake(input):
        count = input.shape[1]
        return input.new_empty(count, dtype=torch.float64), input.new_empty(2 * count)[::2]

    library.register_kernel(
        "foo_tile::columns",
        DEVICES,
        library.tile_kernel(columns, tiles=lambda input: input.shape[1]),
    )
    library.define(
        "foo_tile::add_scalars_",
        "(Tensor(a!) input, float a, float? b=None, *, bool flag=True, int? count=None) -> ()",
    )
    library.register_fake("foo_tile::add_scalars_", lambda input, *args, **kwargs: None)
    library.register_kernel("foo_tile::add_scalars_", DEVICES, library.tile_kernel(add_scalars))


def norm_reference(input, weight, eps=1e-6):
    x = input.double()
    result = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return result if weight is None else result * weight.double()


def check_norm(output, input, weight, dtype):
    """Allow the roundings of the sum, the root and two products, then of the dtype."""
    expected = norm_reference(input, weight)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    roundings = torch.finfo(dtype).eps / 2 + 8 * torch.finfo(computed).eps
    budget = roundings * expected.abs() + torch.finfo(dtype).smallest_normal
    testing.spec.assert_within("norm", output.double(), expected, budget)


# Elements that share memory cannot be written.
WRITABLE_LAYOUTS = [
    layout for layout in testing.LAYOUTS if layout is not testing.arguments.expanded
]


SHAPES = [(), (1,), (7,), (0,), (3, 0), (0, 5), (4, 67), (2, 3, 33), (2, 3, 4, 100)]


@pytest.mark.parametrize("name", ["norm", "norm_v"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_rows(name, dtype, shape, device):
    input = torch.randn(shape, dtype=torch.float64).to(dtype)
    weight = torch.randn(shape[-1:], dtype=torch.float64).to(dtype)
    for given in (None, weight):
        moved = [None if tensor is None else tensor.to(device) for tensor in (input, given)]
        output = getattr(torch.ops.foo_tile, name)(*moved)
        assert (output.dtype, output.device.type, output.shape) == (dtype, device, input.shape)
        check_norm(output.cpu(), input, given, dtype)


@pytest.mark.parametrize("layout", testing.LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts(layout, device):
    input = layout(torch.randn(3, 4, 35))
    weight = layout(torch.randn(35))
    output = torch.ops.foo_tile.norm(
        testing.copy_with_layout(input, device), testing.copy_with_layout(weight, device)
    )
    check_norm(output.cpu(), input, weight, torch.float32)


@pytest.mark.parametrize("layout", WRITABLE_LAYOUTS, ids=lambda layout: layout.__name__)
def test_rows_with_a_stride(layout, device):
    """Without contiguous_rows, rows have the tensor's stride; gaps are not touched."""
    input = torch.randn(3, 4, 35)
    moved = testing.copy_with_layout(layout(input), device)
    memory = moved.untyped_storage()
    whole = torch.empty(0, device=device).set_(memory)
    before = whole.clone()
    torch.ops.foo_tile.add_scalars_(moved, 1.5)
    assert torch.equal(moved.cpu(), layout(input) + 1.5)
    moved.copy_(layout(input))
    torch.testing.assert_close(whole, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_with_any_strides(dtype, device):
    """Columns of a transposed matrix, and results with a stride."""
    input = (torch.arange(35) * 7 % 19 - 9).view(5, 7).to(dtype)
    for matrix in (input, input.T, input[::2, 1::3]):
        sums, largest = torch.ops.foo_tile.columns(testing.copy_with_layout(matrix, device))
        assert torch.equal(sums.cpu(), matrix.double().sum(0))
        assert torch.equal(largest.cpu(), matrix.amax(0))
        assert largest.stride() == (2,)


def test_scalars(device):
    def changed(*args, **kwargs):
        input = torch.zeros(2, 3, device=device)
        assert torch.ops.foo_tile.add_scalars_(input, *args, **kwargs) is None
        values = set(input.flatten().tolist())
        assert len(values) == 1
        return values.pop()

    assert changed(0.5) == 0.5
    assert changed(0.5, flag=False) == 0
    assert changed(0.5, 2.25) == 2.75
    assert changed(0.5, count=-7) == -6.5
    assert changed(0.5, 0.25, count=2**20) == 2**20 + 0.75


@pytest.mark.parametrize("name", ["norm", "norm_v"])
def test_in_place(name, device):
    for base in (torch.randn(6, 50), torch.randn(50, 6).T, torch.randn(6, 100)[:, ::2]):
        input = testing.copy_with_layout(base, device)
        version = input._version
        result = getattr(torch.ops.foo_tile, name + "_")(input)
        assert result is input
        assert input._version == version + 1
        check_norm(input.cpu(), base, None, torch.float32)


def test_in_place_where_elements_share_memory(device):
    input = torch.ones(3, device=device).expand(4, 3)
    with pytest.raises(RuntimeError, match="norm_: input is written, so it must not have elements"):
        torch.ops.foo_tile.norm_(input)


def test_in_place_where_another_input_shares_the_memory(device):
    """The result is as if all inputs were read before the first write."""
    memory = torch.randn(5, 5)
    expected = torch.ops.foo_tile.norm(memory, memory[1])
    memory = memory.to(device)
    assert torch.ops.foo_tile.norm_(memory, memory[1]) is memory
    assert torch.equal(memory.cpu(), expected)


@pytest.mark.parametrize("name", ["norm", "norm_v"])
def test_a_tensor_without_dimensions_is_a_row_of_one_element(name, device):
    operator = getattr(torch.ops.foo_tile, name)
    for value in (-3.0, 0.5, 1e3):
        result = operator(torch.tensor(value, device=device))
        assert result.shape == ()
        torch.testing.assert_close(result.cpu(), torch.tensor(math.copysign(1.0, value)))


def test_what_is_only_read_goes_on_sharing_its_memory(device):
    clone = torch._lazy_clone(torch.randn(3, 7, device=device))
    torch.ops.foo_tile.norm(clone)
    assert torch._C._is_cow_tensor(clone)
    torch.ops.foo_tile.norm_(clone)
    assert not torch._C._is_cow_tensor(clone)


def test_out(device):
    input = torch.randn(6, 50)
    moved = input.to(device)
    for out in (
        torch.empty(6, 50, device=device),
        torch.empty(0, device=device),
        torch.empty(50, 6, device=device).T,
        torch.empty(6, 50, dtype=torch.float64, device=device),
        moved.clone(),
    ):
        strides = out.stride()
        assert torch.ops.foo_tile.norm.out(moved, out=out) is out
        assert out.shape == input.shape
        assert out.numel() == 0 or out.stride() == strides or strides == (1,)
        check_norm(out.cpu(), input, None, torch.float32)
    torch.ops.foo_tile.norm.out(moved, out=moved)
    check_norm(moved.cpu(), input, None, torch.float32)
    with pytest.raises(TypeError, match="norm: out must have a dtype that float32 can be cast to"):
        torch.ops.foo_tile.norm.out(input, out=torch.empty(6, 50, dtype=torch.int64))


def test_out_that_overlaps_the_input_in_part(device):
    """Each row is written before the next one is read."""
    rows = torch.randn(7, 50)
    memory = rows.clone().to(device)
    torch.ops.foo_tile.norm.out(memory[:-1], out=memory[1:])
    check_norm(memory[1:].cpu(), rows[:-1], None, torch.float32)


def test_out_of_another_shape_under_the_fake_kernel(device):
    with FakeTensorMode() as mode:
        input = mode.from_tensor(torch.randn(6, 50, device=device))
        out = torch.empty(0, device=device)
        assert torch.ops.foo_tile.norm.out(input, out=out).shape == (6, 50)


def test_results_whose_strides_follow_the_input(device):
    """The fake kernel's result is cached for these strides, not for this shape."""
    name = "foo_tile::copy_" + device
    library.define(f"{name}_like", "(Tensor input) -> Tensor")
    library.register_fake(f"{name}_like", torch.empty_like)

    @library.register_kernel(f"{name}_like", device)
    @library.tile_kernel
    def copy(input, output, rows):
        for row in rows:
            for i in range(input.shape[-1]):
                output.row(row)[i] = input.row(row)[i]

    call = getattr(torch.ops.foo_tile, f"copy_{device}_like")
    for input in (torch.randn(5, 5, device=device), torch.randn(5, 5, device=device).T):
        output = call(input)
        assert output.stride() == input.stride()
        assert torch.equal(output, input)


def test_same_bits_for_any_number_of_threads(device):
    input = torch.randn(1000, 333, device=device)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(torch.ops.foo_tile.norm(input))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        ("norm", (torch.randn(3, 5),), {}),
        ("norm", (torch.randn(5, 3).T, torch.randn(5)), {"eps": 0.1}),
        ("norm_", (torch.randn(3, 5),), {}),
        ("norm.out", (torch.randn(3, 5),), {"out": torch.empty(3, 5)}),
        ("columns", (torch.randn(3, 5),), {}),
        ("add_scalars_", (torch.randn(3, 5), 1.5), {"count": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_opcheck(operator, args, kwargs, device):
    args, kwargs = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs)
    )
    packet, _, overload = operator.partition(".")
    operator = getattr(getattr(torch.ops.foo_tile, packet), overload or "default")
    results = library.opcheck(operator, args, kwargs)
    assert results == dict.fromkeys(results, "SUCCESS")


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_for_dynamic_shapes(device):
    def function(input, weight):
        return torch.ops.foo_tile.norm(input * 2, weight) + 1

    backend = "inductor" if device == "cpu" else "aot_eager"
    graph = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for rows, size in ((5, 7), (9, 40)):
        input, weight = torch.randn(rows, size, device=device), torch.randn(size, device=device)
        torch.testing.assert_close(graph(input, weight), function(input, weight), rtol=0, atol=0)


def test_fake_kernel_refuses_at_every_shape(device):
    """A known shape does not run it again, but a refused shape is refused again."""
    right, wrong = torch.ones(5, device=device), torch.ones(6, device=device)
    input = torch.ones(3, 5, device=device)
    for _ in range(2):
        torch.ops.foo_tile.norm(input, right)
        with pytest.raises(ValueError, match=r"norm: weight must have shape \[5\]"):
            torch.ops.foo_tile.norm(input, wrong)


def test_mixed_devices():
    for own, other in (("cpu", "foo:0"), ("foo:0", "cpu"), ("foo:0", "foo:1")):
        with pytest.raises(
            ValueError, match=f"norm: weight must be on {own} as input is, got {other}"
        ):
            torch.ops.foo_tile.norm(torch.ones(2, 3, device=own), torch.ones(3, device=other))


def test_fake_kernel_that_returns_nothing(device):
    name = f"foo_tile::nothing_{device}"
    library.define(name, "(Tensor input) -> Tensor")
    library.register_fake(name, lambda input: None)
    library.register_kernel(name, device, library.tile_kernel(lambda input, output, rows: None))
    message = rf"\A{name}: its fake kernel must return a tensor, got None\Z"
    with pytest.raises(TypeError, match=message):
        getattr(torch.ops.foo_tile, f"nothing_{device}")(torch.ones(3, device=device))
