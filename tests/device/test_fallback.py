"""Operators without a kernel for foo run on the CPU kernel over the same memory."""

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher

pytestmark = pytest.mark.usefixtures("products_of_cpu")


def both(function, *shapes, dtype=torch.float32, device="foo:1"):
    """Return a function's results on foo, moved to the CPU, and its results on the CPU."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(shape, generator=generator).to(dtype) for shape in shapes]
    actual = function(*(tensor.to(device) for tensor in inputs))
    expected = function(*inputs)
    return actual, expected


def check(actual, expected, device="foo:1"):
    if isinstance(expected, torch.Tensor):
        assert actual.device == torch.device(device)
        assert actual.dtype == expected.dtype
        assert actual.stride() == expected.stride()
        assert torch.equal(actual.cpu(), expected)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected):
            check(one, other, device)
    else:
        assert actual == expected


OPERATORS = {
    "add": (lambda a, b: a + b, (3, 4), (4,)),
    "number": (lambda a: 2 * a + 1, (3, 4)),
    "matmul": (lambda a, b: a @ b, (2, 3, 4), (4, 5)),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), (3, 4), (5, 4)),
    "several_results": (lambda a: torch.topk(a, 2), (3, 4)),
    "svd": (lambda a: torch.linalg.svd(a), (4, 3)),
    "list_argument": (lambda a, b: torch.cat([a, b], 1), (3, 4), (3, 2)),
    "list_result": (lambda a: torch.tensor_split(a, 3), (7, 2)),
    "optional_list": (lambda a: a[:, [0, 2], None, a[0, 0] > 0.3], (3, 3, 3)),
    "optional_argument": (lambda a, w, b: F.layer_norm(a, (4,), w, b), (3, 4), (4,), (4,)),
    "group_norm": (lambda a, w, b: F.group_norm(a, 2, w, b), (3, 4, 5), (4,), (4,)),
    "stack": (lambda a, b: torch.stack([a, b], 1), (3, 4), (3, 4)),
    "addr": (lambda a, b, c: torch.addr(a, b, c), (3, 4), (3,), (4,)),
    "all": (lambda a: (a > 0.1).all(dim=(0, 1)), (3, 4)),
    "conv2d": (lambda a, w, b: F.conv2d(a, w, b, padding=1), (2, 3, 5, 5), (4, 3, 3, 3), (4,)),
    "conv_transpose1d": (lambda a, w: F.conv_transpose1d(a, w, groups=2), (2, 4, 5), (4, 3, 2)),
    "cross_entropy": (lambda a: F.cross_entropy(a, a.argmin(1)), (5, 3)),
    "embedding": (lambda w: F.embedding(torch.tensor([[1, 2]], device=w.device), w), (5, 3)),
    "sort": (lambda a: a.sort(dim=0, descending=True), (5, 3)),
    "unique": (lambda a: a.gt(0.5).float().unique(return_counts=True), (20,)),
    "nonzero": (lambda a: a.gt(0.5).nonzero(), (4, 4)),
    "fft": (lambda a: torch.fft.rfft(a), (3, 8)),
    "complex": (lambda a: torch.complex(a, a).conj() @ torch.complex(a, -a), (3, 3)),
    "scan": (lambda a: a.cumsum(1).cumprod(0).logcumsumexp(1), (3, 4)),
    "scatter": (lambda a: a.scatter_add(0, a.argsort(0), a), (3, 4)),
    "bucketize": (lambda a, b: torch.bucketize(a, b.sort().values), (3, 4), (5,)),
    "interpolate": (lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), (1, 2, 3, 3)),
    "pool": (lambda a: F.max_pool2d(a, 2, return_indices=True), (1, 2, 4, 4)),
    "where": (lambda a: torch.where(a > 0.5, a, 0), (3, 4)),
    "foreach": (lambda a, b: torch._foreach_mul([a, b], [b, a]), (3,), (3,)),
    "item": (lambda a: (a.max().item(), torch.equal(a, a), a.allclose(a)), (3,)),
    "histogram": (lambda a: torch.histc(a, 4, 0, 1), (20,)),
    "solve": (lambda a, b: torch.linalg.solve(a, b), (3, 3), (3, 2)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_values(name):
    function, *shapes = OPERATORS[name]
    check(*both(function, *shapes))


IN_PLACE = {
    "add_": lambda a: a.add_(1),
    "out_of_a_view": lambda a: a[1:].mul_(3),
    "masked_fill_": lambda a: a.masked_fill_(a > 0.5, -1),
    "index_put_": lambda a: a.index_put_((torch.tensor([0, 2]),), torch.tensor(7.0)),
    "setitem": lambda a: a.__setitem__((slice(None), [0, 1]), 5.0),
    "transpose_": lambda a: a.transpose_(0, 1),
    "squeeze_": lambda a: a.unsqueeze_(0).squeeze_(0),
    "sort_": lambda a: torch.sort(
        a.clone(), out=(a, torch.empty(0, dtype=torch.int64, device=a.device))
    ),
    "foreach_": lambda a: torch._foreach_add_([a, a[0]], 2.0),
    "clamp_": lambda a: a.clamp_(0.2, 0.8),
    "swap": lambda a: a.t_().copy_(a.clone()),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name):
    actual, expected = torch.rand(3, 4).to("foo:1"), None
    expected = actual.cpu()
    address = actual.data_ptr()
    IN_PLACE[name](actual)
    IN_PLACE[name](expected)
    check(actual, expected)
    assert actual.data_ptr() == address


def test_in_place_returns_its_argument():
    tensor = torch.ones(3, device="foo")
    assert tensor.add_(1) is tensor
    out = torch.empty(3, device="foo")
    assert torch.add(tensor, 1, out=out) is out
    values, indices = torch.empty(2, device="foo"), torch.empty(2, dtype=torch.int64, device="foo")
    result = torch.topk(tensor, 2, out=(values, indices))
    assert result.values is values
    assert result.indices is indices


def test_boxed_calls_return_their_arguments():
    # Without autograd, only the fallback decides what torch.ops returns.
    with torch.inference_mode():
        tensor = torch.ones(3, device="foo")
        assert torch.ops.aten.add_.Tensor(tensor, tensor) is tensor
        out = torch.empty(3, device="foo")
        assert torch.ops.aten.add.out(tensor, tensor, out=out) is out


def test_lists_of_tensors_on_several_devices():
    devices = ["foo:0", "foo:1", "cpu"]
    tensors = [torch.full((2,), 3.0, device=device) for device in devices]
    torch._foreach_add_(tensors, 1)
    results = torch._foreach_mul(tensors, tensors)
    torch._foreach_mul_(results[:2], torch.tensor(0.5))
    assert [str(tensor.device) for tensor in results] == devices
    assert [tensor.tolist() for tensor in results] == [[8, 8], [8, 8], [16, 16]]
    torch._foreach_copy_(results[:2], tensors[1:])
    assert [tensor.tolist() for tensor in results] == [[4, 4], [4, 4], [16, 16]]


def test_out_grows_on_its_device():
    out = torch.empty(0, device="foo:1")
    tensor = torch.rand(100, device="foo:1")
    before = torch.foo.memory_allocated(1)
    torch.add(tensor, tensor, out=out)
    assert torch.equal(out, tensor * 2)
    assert out.device == torch.device("foo:1")
    assert torch.foo.memory_allocated(1) == before + 448
    torch.linalg.qr(tensor.view(10, 10), out=(out.resize_(0), torch.empty(0, device="foo:1")))
    assert out.shape == (10, 10)
    assert torch.foo.memory_allocated(1) == before + 448
    out.resize_(1000)
    assert torch.foo.memory_allocated(1) == before + 4032


def test_growth_is_seen_by_all_tensors_of_the_storage():
    out = torch.arange(4.0, device="foo")
    view = out.view(2, 2)
    torch.linalg.qr(torch.eye(6, device="foo"), out=(out.resize_(0), torch.empty(0, device="foo")))
    assert view.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    assert torch.equal(view.cpu().flatten(), out.cpu().flatten()[:4])


def test_long_lists():
    """Lists of 16 tensors and more use a table. Some tensors repeat, some are views of others."""

    def function(whole):
        parts = [*whole.split(1), *whole.t().split(1), whole[:3], whole[:3], whole + 1]
        return (
            torch.cat([part.reshape(-1) for part in parts]),
            torch.cat([*whole.unbind(), *whole.unbind()], out=whole.new_empty(0)),
            torch.split_copy(whole, 1),
            torch.cat([whole[0:0]] * 20 + [whole]),
        )

    check(*both(function, (30, 20)))


def test_long_lists_that_are_written():
    """One call changes the moments and the weights of forty parameters."""
    results = []
    for device in ("cpu", "foo:1"):
        generator = torch.Generator().manual_seed(0)
        weights = [torch.rand(n + 1, generator=generator).to(device) for n in range(40)]
        for weight in weights:
            weight.grad = weight * 2
        optimizer = torch.optim.AdamW(weights, fused=True)
        for _ in range(2):
            optimizer.step()
        results.append([*weights, *(optimizer.state[each]["exp_avg"] for each in weights)])
    check(results[1], results[0])


def test_overlap_is_found_in_long_lists():
    tensor = torch.ones(30, 4, device="foo")
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        torch.cat(tensor[:-1].split(1), out=tensor[1:])


def test_overlap_is_found_between_arguments():
    tensor = torch.arange(5.0, device="foo")
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        torch.add(tensor[:-1], 1, out=tensor[1:])
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        tensor[:1].expand(3).add_(1)


def test_nothing_is_copied():
    tensor = torch.rand(1 << 16, device="foo")
    torch.foo.reset_peak_memory_stats()
    base = torch.foo.memory_allocated()
    tensor.sigmoid_().mul_(2)
    tensor.sum()
    assert torch.foo.max_memory_allocated() - base < 1024


def test_autocast_for_cpu_does_not_touch_foo():
    matrix = torch.rand(4, 4, device="foo")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (matrix @ matrix).dtype == torch.float32
        assert (matrix.cpu() @ matrix.cpu()).dtype == torch.bfloat16
    # This CPU kernel calls operators from autocast's lists.
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True, device="foo").eval()
    with torch.inference_mode():
        expected, _ = attention(tokens := torch.rand(2, 3, 8, device="foo"), tokens, tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual, _ = attention(tokens, tokens, tokens)
    assert torch.equal(actual, expected)


def test_autocast():
    matrix = torch.rand(4, 4, device="foo")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("foo", dtype=dtype):
            assert (matrix @ matrix).dtype == dtype
            assert (matrix @ matrix).softmax(0).dtype == torch.float32
            assert torch.addcmul(matrix, matrix.to(dtype), matrix).dtype == torch.float32
            with pytest.raises(RuntimeError, match="are unsafe to autocast"):
                F.binary_cross_entropy(matrix, matrix)
        assert (matrix @ matrix).dtype == torch.float32


def test_kernel_that_leaves_a_conjugation_pending():
    def solve(device):
        matrix = torch.complex(torch.eye(3) * 2, torch.ones(3, 3)).to(device)
        factors, pivots = torch.linalg.lu_factor(matrix)
        return torch.linalg.lu_solve(factors, pivots, matrix * 1j, left=False, adjoint=True)

    assert solve("cpu").is_conj()
    assert torch.equal(solve("foo").cpu(), solve("cpu"))


def test_modes_see_operators_once():
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    tensor = torch.ones(3, device="foo")
    with Mode():
        tensor + 1
    assert seen == ["aten.add.Tensor"]


def test_python_dispatcher():
    """The dispatcher also calls kernels with keys that have already run, such as autograd's."""
    with enable_python_dispatcher():
        assert torch.full((2,), 0.5, device="foo").tolist() == [0.5, 0.5]
        sparse = torch.eye(2, device="foo").to_sparse()
        assert (sparse * 2).to_dense().tolist() == [[2, 0], [0, 2]]


def test_function_transforms():
    tensor = torch.rand(3, 4, device="foo:1")
    check(torch.func.vmap(torch.sin)(tensor), tensor.cpu().sin())
    check(torch.func.grad(lambda t: (t**2).sum())(tensor), tensor.cpu() * 2)
    check(torch.func.jacfwd(torch.sin)(tensor[0]), torch.func.jacfwd(torch.sin)(tensor[0].cpu()))
    primal, tangent = torch.func.jvp(torch.sin, (tensor,), (tensor,))
    check(primal, tensor.cpu().sin())
    check(tangent, tensor.cpu().cos() * tensor.cpu())


def test_custom_operator_with_a_cpu_kernel():
    @torch.library.custom_op("foo_test::twice", mutates_args=(), device_types="cpu")
    def twice(x: torch.Tensor) -> torch.Tensor:
        assert x.device.type == "cpu"
        return x * 2

    assert torch.equal(twice(torch.ones(3, device="foo")).cpu(), torch.full((3,), 2.0))


def test_a_number_on_the_cpu_that_is_the_result_stays_there():
    with torch.library._scoped_library("foo_test_second", "DEF") as library:
        library.define("second(Tensor x, Tensor(a) y) -> Tensor(a)")
        library.impl("second", lambda x, y: y.view(1), "CPU")
        number = torch.tensor(2.0)
        result = torch.ops.foo_test_second.second(torch.ones(3, device="foo"), number)
        assert result.device.type == "cpu"
        result.add_(1)
        assert number.item() == 3


def test_operator_without_any_kernel():
    with torch.library._scoped_library("foo_test", "FRAGMENT") as library:
        library.define("nothing(Tensor x) -> Tensor")
        message = "foo_test::nothing has no kernel for foo, and none for cpu that could run instead"
        with pytest.raises(NotImplementedError, match=message):
            torch.ops.foo_test.nothing(torch.ones(1, device="foo"))


FOUND = "Expected all tensors to be on the same device, but found at least two devices, {}!"
GOT = (
    "Expected all tensors to be on the same device, but got {} is on {}, different from other"
    " tensors on foo:0 (when checking argument in method {})"
)
MIXED = {
    "add": (lambda foo, cpu, _: foo + cpu, FOUND.format("foo:0 and cpu")),
    "add_reversed": (lambda foo, cpu, _: cpu + foo, FOUND.format("foo:0 and cpu")),
    "add_devices": (lambda foo, _, other: foo + other, FOUND.format("foo:0 and foo:1")),
    "add_": (lambda foo, cpu, _: foo.add_(cpu), FOUND.format("foo:0 and cpu")),
    "into_cpu": (lambda foo, cpu, _: cpu.add_(foo), FOUND.format("foo:0 and cpu")),
    "into_0d_cpu": (lambda foo, cpu, _: cpu[0].add_(foo[0]), FOUND.format("foo:0 and cpu")),
    "out": (
        lambda foo, cpu, _: torch.add(foo, foo, out=cpu),
        GOT.format("out", "cpu", "aten::add"),
    ),
    "out_0d": (
        lambda foo, cpu, _: torch.add(foo[0], foo[0], out=cpu[0]),
        GOT.format("out", "cpu", "aten::add"),
    ),
    "cat": (
        lambda foo, cpu, _: torch.cat([foo, cpu]),
        GOT.format("tensors", "cpu", "aten::cat"),
    ),
    "mm": (
        lambda foo, _, other: torch.mm(foo[None], other[:, None]),
        GOT.format("mat2", "foo:1", "aten::mm"),
    ),
    "embedding": (
        lambda foo, cpu, _: F.embedding(cpu.long(), foo[:, None]),
        GOT.format("index", "cpu", "aten::index_select"),
    ),
    "index_from_another_device": (
        lambda foo, _, other: foo[other.long()],
        "indices should be either on cpu or on the same device as the indexed tensor (foo:0)",
    ),
    "index_on_foo": (
        lambda foo, cpu, _: cpu[foo.long()],
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_are_refused(name):
    function, message = MIXED[name]
    foo, cpu, other = torch.zeros(2, device="foo"), torch.zeros(2), torch.zeros(2, device="foo:1")
    with pytest.raises(RuntimeError) as error:
        function(foo, cpu, other)
    assert str(error.value).splitlines()[0] == message
    assert foo.tolist() == cpu.tolist() == other.tolist() == [0, 0]


def test_numbers_on_the_cpu_may_be_mixed():
    tensor = torch.ones(2, device="foo:1")
    for result in (
        tensor + torch.tensor(2.0),
        torch.tensor(2.0) + tensor,
        torch.where(tensor > 0, torch.tensor(3.0), tensor),
        tensor.clone().mul_(torch.tensor(3.0)),
        torch.lerp(tensor, tensor * 5, torch.tensor(0.5)),
    ):
        assert result.tolist() == [3, 3]
        assert result.device == torch.device("foo:1")
    assert (torch.tensor(2, dtype=torch.float64) + tensor).dtype == torch.float32


def test_indices_on_the_cpu_may_be_mixed():
    tensor = torch.arange(4.0, device="foo:1")
    assert tensor[torch.tensor([3, 1])].tolist() == [3, 1]
    assert tensor[torch.tensor([True, False, False, True])].tolist() == [0, 3]
    tensor[torch.tensor([0])] = 9
    tensor.index_put_((torch.tensor([1]),), torch.tensor([8.0], device="foo:1"), accumulate=True)
    assert tensor.tolist() == [9, 9, 2, 3]
