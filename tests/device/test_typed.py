"""Legacy classes for one dtype: torch.foo.FloatTensor, torch.foo.FloatStorage."""

import pytest
import torch

NAMES = [name for name in torch.cuda.__all__ if name.endswith(("Tensor", "Storage"))]


@pytest.mark.parametrize("name", NAMES)
def test_each_class_of_cuda_is_there(name):
    assert getattr(torch.foo, name).__name__ == name
    assert getattr(torch.foo, name).__module__ == "torch.foo"


@pytest.mark.parametrize("dtype", ["Float", "Double", "Half", "BFloat16", "Long", "Int", "Short",
                                   "Char", "Byte", "Bool"])  # fmt: skip
def test_tensors(dtype):
    kind = getattr(torch.foo, f"{dtype}Tensor")
    other = torch.foo.ByteTensor if dtype == "Float" else torch.foo.FloatTensor
    on_cpu = getattr(torch, f"{dtype}Tensor")([1, 0, 1])
    tensor = kind([1, 0, 1])
    assert tensor.device == torch.device("foo:0")
    assert tensor.dtype == on_cpu.dtype == kind.dtype
    assert tensor.type() == f"torch.foo.{dtype}Tensor"
    assert torch.equal(tensor.cpu(), on_cpu)
    assert isinstance(tensor, kind)
    assert not isinstance(on_cpu, kind)
    assert not isinstance(tensor, other)
    for target in (kind, f"torch.foo.{dtype}Tensor"):
        assert torch.ones(3).type(target).type() == f"torch.foo.{dtype}Tensor"
    assert tensor.type(other).dtype == other.dtype


def test_ways_to_make_a_tensor():
    kind = torch.foo.FloatTensor
    assert kind().shape == (0,)
    assert kind(2, 3).shape == kind(torch.Size([2, 3])).shape == (2, 3)
    assert kind((2, 3)).tolist() == [2, 3]
    assert kind(2, device="foo:1").device.index == 1
    tensor = torch.ones(2, device="foo")
    same = kind(tensor)
    same.zero_()
    assert tensor.tolist() == [0, 0]
    with pytest.raises(TypeError, match=r"^expected FloatTensor \(got torch.foo.LongTensor\)$"):
        kind(tensor.long())
    with pytest.raises(
        RuntimeError,
        match=r"^legacy constructor expects device type: foo but device type: cpu was passed$",
    ):
        kind(2, device="cpu")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages():
    storage = torch.foo.DoubleStorage([1.0, 2.0])
    assert storage.is_foo
    assert storage.tolist() == [1, 2]
    assert storage.type() == "torch.foo.DoubleStorage"
    assert isinstance(storage, torch.foo.DoubleStorage)
    assert not isinstance(storage, torch.foo.FloatStorage)
    assert not isinstance(storage.cpu(), torch.foo.DoubleStorage)
    assert torch.foo.FloatStorage(3).size() == 3
    assert torch.ones(2, device="foo").int().storage().type() == "torch.foo.IntStorage"
    assert torch.ones(2, device="foo").storage().dtype == torch.foo.FloatStorage.dtype
    with pytest.raises(RuntimeError, match="Device of 'wrap_storage' must be foo, but got cpu"):
        torch.foo.FloatStorage(wrap_storage=torch.UntypedStorage(4))
