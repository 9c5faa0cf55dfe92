"""Copies may be strided, convert, cross devices, with conjugation and negation pending."""

import itertools

import pytest
import torch

DEVICES = ["cpu", "foo:0", "foo:1"]
PAIRS = [pair for pair in itertools.product(DEVICES, DEVICES) if pair != ("cpu", "cpu")]

LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.mT,
    "stepped": lambda tensor: tensor[..., ::2],
    "expanded": lambda tensor: tensor[:1].expand(5, 4, 6),
    "offset": lambda tensor: tensor[1:, 1:],
    "scalar": lambda tensor: tensor[0, 0, 0],
    "empty": lambda tensor: tensor[:0],
}


def numbers(dtype=torch.float32):
    return torch.arange(48).sub(20).reshape(2, 4, 6).to(dtype)


@pytest.mark.parametrize(("source", "destination"), PAIRS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_to(source, destination, layout):
    expected = LAYOUTS[layout](numbers())
    tensor = LAYOUTS[layout](numbers().to(source))
    for non_blocking in (False, True):
        copy = tensor.to(destination, non_blocking=non_blocking, copy=True)
        assert copy.device == torch.device(destination)
        assert copy.data_ptr() != tensor.data_ptr() or copy.numel() == 0
        torch.foo.synchronize(source if source != "cpu" else destination)
        assert torch.equal(copy.cpu(), expected)


@pytest.mark.parametrize(("source", "destination"), PAIRS)
@pytest.mark.parametrize("layout", ["transposed", "stepped", "offset"])
def test_copy_into_strided_memory(source, destination, layout):
    target = LAYOUTS[layout](torch.zeros(2, 4, 6, device=destination))
    values = LAYOUTS[layout](numbers())
    target.copy_(values.contiguous().to(source))
    assert torch.equal(target.cpu(), values)
    assert target._base.sum().item() == values.sum().item()


@pytest.mark.parametrize(("source", "destination"), PAIRS)
@pytest.mark.parametrize(
    ("from_dtype", "to_dtype"),
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.int64),
        (torch.int32, torch.float16),
        (torch.float32, torch.complex64),
        (torch.int64, torch.bool),
        (torch.bool, torch.float32),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_converting(source, destination, from_dtype, to_dtype):
    tensor = numbers(from_dtype)
    expected = tensor.to(to_dtype)
    actual = torch.empty(tensor.shape, dtype=to_dtype, device=destination)
    actual.copy_(tensor.to(source))
    assert torch.equal(actual.cpu().to(torch.complex128), expected.to(torch.complex128))


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_pending_conjugation_and_negation(source, destination):
    values = torch.view_as_complex(numbers().reshape(2, 4, 3, 2))
    for view in (lambda z: z.conj(), lambda z: z.conj().imag, lambda z: torch._neg_view(z)):
        tensor = view(values.to(source))
        assert tensor.is_conj() or tensor.is_neg()
        expected = view(values).resolve_conj().resolve_neg()
        assert torch.equal(tensor.to(destination).cpu().resolve_conj().resolve_neg(), expected)
        target = torch.zeros(tensor.shape, dtype=tensor.dtype, device=destination)
        assert torch.equal(target.copy_(tensor).cpu(), expected)
        # Into memory that has the pending bit itself.
        target = view(values.clone().zero_().to(destination))
        assert torch.equal(target.copy_(tensor).cpu().resolve_conj().resolve_neg(), expected)


def test_broadcasting():
    target = torch.zeros(3, 4, device="foo")
    target.copy_(torch.arange(4.0))
    assert torch.equal(target.cpu(), torch.arange(4.0).expand(3, 4))


def test_copies_are_done_at_once():
    target = torch.empty(1 << 20, device="foo")
    target.copy_(torch.ones(1 << 20), non_blocking=True)
    assert target.cpu().eq(1).all()


def test_overlap_is_refused():
    tensor = torch.arange(10.0, device="foo")
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        tensor[1:].copy_(tensor[:-1])
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        tensor[:1].expand(4).copy_(tensor[:4])
    assert torch.equal(tensor.cpu(), torch.arange(10.0))


def test_no_copy_where_nothing_changes():
    tensor = torch.ones(3, device="foo:1")
    assert tensor.to("foo:1") is tensor
    assert tensor.foo(1) is tensor


def test_numbers():
    for value in (1.5, 3, True, 1 - 2j):
        number = torch.tensor(value, device="foo:1")
        assert number.item() == value
        assert type(number.item()) is type(value)
    assert torch.tensor(1 - 2j, device="foo").conj().item() == 1 + 2j
    assert torch.arange(4, device="foo")[::2].tolist() == [0, 2]
    with pytest.raises(
        RuntimeError, match="a Tensor with 2 elements cannot be converted to Scalar"
    ):
        torch.ones(2, device="foo").item()


def test_generated_methods():
    tensor = torch.ones(3)
    assert tensor.foo().device == torch.device("foo:0")
    assert tensor.foo(1).device == torch.device("foo:1")
    assert tensor.foo().is_foo
    assert not tensor.is_foo
    module = torch.nn.Linear(2, 2).foo(1)
    assert module.weight.device == torch.device("foo:1")
    storage = tensor.untyped_storage().foo(1)
    assert storage.is_foo
    assert storage.device == torch.device("foo:1")
    assert tensor.untyped_storage().tolist() == storage.cpu().tolist()
    packed = torch.nn.utils.rnn.pack_sequence([tensor]).foo()
    assert packed.is_foo


@pytest.mark.parametrize("size", [0, 3])
def test_lazy_clone(size):
    tensor = torch.ones(size, device="foo:1")
    clone = torch._lazy_clone(tensor)
    clone.add_(1)
    assert tensor.tolist() == [1] * size
    assert clone.tolist() == [2] * size


def test_numpy_is_refused():
    message = "can't convert foo:1 device type tensor to numpy. Use Tensor.cpu()"
    with pytest.raises(TypeError, match=message):
        torch.ones(2, device="foo:1").numpy()


def test_pinned_memory():
    tensor = torch.arange(4.0)
    pinned = tensor.pin_memory()
    assert not tensor.is_pinned()
    assert pinned.is_pinned()
    assert pinned[2:].is_pinned()
    assert torch.from_numpy(pinned.numpy()[1:]).is_pinned()
    assert torch.equal(pinned, tensor)
    assert torch.equal(pinned.to("foo:1", non_blocking=True).cpu(), tensor)
    assert tensor.foo().to("cpu", non_blocking=True).is_pinned()
    assert torch.empty(0, pin_memory=True).numel() == 0
    assert not tensor.foo().is_pinned()
    assert torch.empty(4, pin_memory=True).is_pinned()
    message = "cannot pin 'fooFloatType' only dense CPU tensors can be pinned"
    with pytest.raises(RuntimeError, match=message):
        tensor.foo().pin_memory()
