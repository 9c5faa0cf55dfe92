"""Quantized, sparse and nested tensors work on device foo."""

import copy
import gc
import io

import pytest
import torch
from support.exact import assert_near

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MATRIX = torch.tensor([[0.0, 1.5, 0, -2], [0, 0, 0.5, 0], [3, 0, 0, 0], [0, 0, 0, 0]])


def quantized_per_channel(device):
    scales = torch.tensor([0.1, 0.2, 0.5, 1.0]).to(device)
    zero_points = torch.tensor([0, 1, 2, 3]).to(device)
    return torch.quantize_per_channel(MATRIX.to(device), scales, zero_points, 0, torch.qint8)


def nested(device):
    parts = [MATRIX[:2].to(device), MATRIX[:3].to(device)]
    return torch.nested.as_nested_tensor(parts)


LAYOUTS = {
    "sparse_coo": lambda device: MATRIX.to(device).to_sparse(),
    "sparse_coo_hybrid": lambda device: MATRIX.to(device).to_sparse(1),
    "sparse_csr": lambda device: MATRIX.to(device).to_sparse_csr(),
    "sparse_csc": lambda device: MATRIX.to(device).to_sparse_csc(),
    "sparse_bsr": lambda device: MATRIX.to(device).to_sparse_bsr((2, 2)),
    "sparse_bsc": lambda device: MATRIX.to(device).to_sparse_bsc((2, 2)),
    "quantized": lambda device: torch.quantize_per_tensor(
        MATRIX.to(device), 0.05, 60, torch.quint8
    ),
    "quantized_per_channel": quantized_per_channel,
    "nested": nested,
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


def parts(tensor):
    """Return the dense tensors that make up a tensor."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        scheme = tensor.qscheme()
        if scheme == torch.per_tensor_affine:
            return [tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point()]
        return [
            tensor.int_repr(),
            tensor.q_per_channel_scales(),
            tensor.q_per_channel_zero_points(),
            tensor.q_per_channel_axis(),
        ]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values(), tensor.is_coalesced()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def check(actual, expected, device="foo:1"):
    assert actual.device == torch.device(device)
    assert (actual.layout, actual.dtype) == (expected.layout, expected.dtype)
    for one, other in zip(parts(actual), parts(expected)):
        if isinstance(other, torch.Tensor):
            assert one.device == torch.device(device)
            assert torch.equal(one.cpu(), other.cpu())
        else:
            assert one == other


def test_values(layout):
    check(LAYOUTS[layout]("foo:1"), LAYOUTS[layout]("cpu"))


def test_moves(layout):
    expected = LAYOUTS[layout]("cpu")
    there = expected.to("foo:1")
    check(there, expected)
    check(there.to("foo:0"), expected, "foo:0")
    check(there.cpu(), expected, "cpu")
    check(there.clone(), expected)
    check(there.detach(), expected)
    if there.layout == torch.strided:  # strided, with one storage
        addresses = {each.untyped_storage().data_ptr() for each in (expected, there, there.cpu())}
        assert len(addresses) == 3


def test_files(layout):
    expected = LAYOUTS[layout]("cpu")
    file = io.BytesIO()
    torch.save(expected.to("foo:1"), file)
    for device in ("foo:1", "foo:0", "cpu"):
        file.seek(0)
        # torch 2.15 does not load nested tensors with weights_only.
        loaded = torch.load(file, map_location=device, weights_only=layout != "nested")
        check(loaded, expected, device)


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_indices_that_are_wrong(device):
    values = torch.ones(2, device=device)
    for indices, is_coalesced, message in (
        ([[0, 1], [1, 2]], True, None),
        ([[1, 0], [1, 2]], True, "uncoalesced COO tensor"),
        ([[0, 1], [1, 3]], False, "size is inconsistent with indices"),
    ):
        arguments = torch.tensor(indices, device=device), values, (3, 3), is_coalesced
        if message is None:
            torch._validate_sparse_coo_tensor_args(*arguments)
        else:
            with pytest.raises(RuntimeError, match=message):
                torch._validate_sparse_coo_tensor_args(*arguments)


def test_deepcopy(layout):
    if layout == "nested":
        pytest.skip("the CPU cannot do it either")
    check(copy.deepcopy(LAYOUTS[layout]("foo:1")), LAYOUTS[layout]("cpu"))


def test_printing(layout):
    text = str(LAYOUTS[layout]("foo:1"))
    assert "device='foo:1'" in text


def test_dense_values_come_back(layout):
    tensor = LAYOUTS[layout]("foo:1")
    if tensor.is_nested:
        dense, expected = tensor.to_padded_tensor(0), nested("cpu").to_padded_tensor(0)
    elif tensor.is_quantized:
        dense, expected = tensor.dequantize(), LAYOUTS[layout]("cpu").dequantize()
    else:
        dense, expected = tensor.to_dense(), MATRIX
    assert dense.device == torch.device("foo:1")
    assert torch.equal(dense.cpu(), expected)


def test_memory_is_on_the_device(layout):
    gc.collect()  # Free earlier tests' garbage now, not in between.
    before = torch.foo.memory_allocated(1)
    tensor = LAYOUTS[layout]("cpu").to("foo:1")
    assert torch.foo.memory_allocated(1) > before
    del tensor
    assert torch.foo.memory_allocated(1) == before


SPARSE = [name for name in LAYOUTS if name.startswith("sparse")]


@pytest.mark.parametrize("layout", SPARSE)
def test_sparse_product(layout):
    other = torch.rand(4, 3)
    if layout in ("sparse_coo_hybrid", "sparse_bsc"):
        pytest.skip("the CPU has no such product")
    result = LAYOUTS[layout]("foo") @ other.to("foo")
    assert result.device == torch.device("foo:0")
    assert_near(result, MATRIX.double() @ other.double())


def test_sparse_in_place():
    tensor = LAYOUTS["sparse_coo"]("foo")
    assert tensor.mul_(3) is tensor
    tensor.add_(MATRIX.to("foo").to_sparse())
    assert torch.equal(tensor.to_dense().cpu(), MATRIX * 4)
    tensor.zero_()
    assert tensor._nnz() == 0
    tensor.resize_as_(torch.eye(7, device="foo").to_sparse())
    assert tensor.shape == (7, 7)


def test_sparse_constructors():
    indices, values = torch.tensor([[2, 0, 2], [1, 3, 1]]), torch.tensor([1.0, 2, 3])
    tensor = torch.sparse_coo_tensor(indices, values, (3, 4), device="foo:1")
    expected = torch.sparse_coo_tensor(indices, values, (3, 4))
    check(tensor, expected)
    check(tensor.coalesce(), expected.coalesce())
    compressed = torch.tensor([0, 1, 1, 3]), torch.tensor([3, 0, 1]), values
    check(
        torch.sparse_csr_tensor(*compressed, (3, 4), device="foo:1"),
        torch.sparse_csr_tensor(*compressed, (3, 4)),
    )
    empty = torch.empty(3, 4, layout=torch.sparse_coo, device="foo:1")
    assert (empty.device, empty._nnz()) == (torch.device("foo:1"), 0)
    check(torch.zeros(2, 2, layout=torch.sparse_csr, device="foo:1").to_sparse_coo(),
          torch.zeros(2, 2).to_sparse())  # fmt: skip


def test_sparse_gradients():
    results = []
    for device in ("cpu", "foo"):
        matrix = LAYOUTS["sparse_coo"](device).requires_grad_()
        other = torch.arange(12.0).view(4, 3).to(device).requires_grad_()
        torch.sparse.mm(matrix, other).square().sum().backward()
        results.append((matrix.grad, other.grad))
    (sparse, dense), (foo_sparse, foo_dense) = results
    check(foo_sparse.coalesce(), sparse.coalesce(), "foo:0")
    assert torch.equal(foo_dense.cpu(), dense)


def test_sparse_embedding_and_its_optimizer():
    weights = []
    for device in ("cpu", "foo"):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(10, 3, sparse=True).to(device)
        optimizer = torch.optim.SparseAdam(embedding.parameters())
        for _ in range(3):
            embedding(torch.tensor([1, 4, 1], device=device)).square().sum().backward()
            assert embedding.weight.grad.is_sparse
            optimizer.step()
            optimizer.zero_grad()
        weights.append(embedding.weight.detach().cpu())
    assert torch.equal(*weights)


def test_quantized_views_keep_their_quantizer():
    tensor = LAYOUTS["quantized"]("foo")
    for view in (tensor[1:], tensor.view(2, 8), tensor.t(), tensor.as_strided((2, 2), (1, 2))):
        assert view.is_quantized
        assert (view.q_scale(), view.q_zero_point()) == (0.05, 60)
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert torch.equal(tensor.t().dequantize().cpu(), tensor.dequantize().cpu().t())


def test_quantized_layers():
    layer = torch.ao.nn.quantized.Quantize(0.1, 3, torch.quint8).to("foo")
    inputs = torch.linspace(-1, 2, 7)
    result = layer(inputs.to("foo"))
    check(result, torch.ao.nn.quantized.Quantize(0.1, 3, torch.quint8)(inputs), "foo:0")
    fake = torch.fake_quantize_per_tensor_affine(inputs.to("foo"), 0.1, 3, 0, 255)
    assert torch.equal(fake.cpu(), torch.fake_quantize_per_tensor_affine(inputs, 0.1, 3, 0, 255))


def test_nested_gradients():
    weight = torch.rand(4, 5)
    grads = []
    for device in ("cpu", "foo"):
        each = weight.clone().to(device).requires_grad_()
        torch.nn.functional.linear(nested(device), each.t()).to_padded_tensor(
            0
        ).square().sum().backward()
        grads.append(each.grad.cpu())
    assert torch.equal(*grads)


def test_sizes_of_nested_tensors_stay_on_the_cpu():
    """The sizes are parts of the tensor, on the CPU as on other devices."""
    tensor = nested("foo")
    for name in ("size", "strides", "storage_offsets"):
        method = getattr(torch.Tensor, f"_nested_tensor_{name}")
        part = method(tensor)
        assert part.device.type == "cpu"
        assert torch.equal(part, method(nested("cpu")))
    del part
    assert torch.equal(tensor.to_padded_tensor(0).cpu(), nested("cpu").to_padded_tensor(0))


def test_jagged_tensors():
    for device in ("cpu", "foo"):
        jagged = torch.nested.nested_tensor(
            [torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged, device=device
        )
        doubled = torch.nn.functional.relu(jagged * 2 - 1)
        assert doubled.device.type == device
        assert [part.sum().item() for part in doubled.unbind()] == [6, 12]


def test_devices_do_not_mix():
    sparse = LAYOUTS["sparse_coo"]("foo")
    for other in (LAYOUTS["sparse_coo"]("cpu"), LAYOUTS["sparse_coo"]("foo:1")):
        with pytest.raises(RuntimeError, match="same device"):
            sparse + other


def test_mkldnn_is_refused():
    with pytest.raises(NotImplementedError, match="foo: tensors of layout Mkldnn"):
        torch.eye(2, device="foo").to_mkldnn()


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_gradients_of_sparse_reductions(reduce):
    """The kernel finds out from its argument whether a backward pass will follow."""
    results = []
    for device in ("cpu", "foo"):
        sparse = MATRIX.to(device).to_sparse_csr().requires_grad_()
        dense = torch.arange(12.0, device=device).view(-1, 3)[: MATRIX.shape[1]].requires_grad_()
        output = torch.sparse.mm(sparse, dense, reduce)
        gradients = torch.autograd.grad(output.square().sum(), (sparse, dense))
        results.append([each.to_dense().cpu() for each in (output.detach(), *gradients)])
    for on_cpu, on_foo in zip(*results):
        assert torch.equal(on_foo, on_cpu)
