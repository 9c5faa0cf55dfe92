"""A backend's numbers and flags stay with a tensor through copies, files and views."""

import copy
import io

import pytest
import torch


@pytest.fixture
def tensor():
    tensor = torch.arange(6.0, device="foo").view(2, 3)
    torch.foo.set_backend_meta(tensor, 3, -29)
    return tensor


def saved_and_loaded(tensor, **options):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, **options)


def test_default_is_none():
    assert torch.foo.get_backend_meta(torch.ones(2, device="foo")) is None
    assert torch.foo.get_backend_meta(torch.ones(2)) is None


@pytest.mark.parametrize(
    "function",
    [
        copy.deepcopy,
        saved_and_loaded,
        torch.Tensor.clone,
        torch.Tensor.detach,
        lambda t: t.to("foo:1"),
        lambda t: t.to(torch.float64),
        lambda t: t.cpu().to("foo"),
        lambda t: t.cpu(),
        lambda t: t.t().t(),
        lambda t: saved_and_loaded({"t": t}, map_location="foo:1")["t"],
        lambda t: saved_and_loaded(t, weights_only=False),
        lambda t: copy.deepcopy(torch.nn.Parameter(t)).data,
    ],
)
def test_it_survives(tensor, function):
    result = function(tensor)
    assert result is not tensor
    assert torch.foo.get_backend_meta(result) == (3, -29)
    assert torch.equal(result.cpu().float(), tensor.cpu())


def test_a_destination_keeps_its_own(tensor):
    other = torch.zeros(2, 3, device="foo")
    torch.foo.set_backend_meta(other, 1, 1)
    other.copy_(tensor)
    assert torch.foo.get_backend_meta(other) == (1, 1)


def test_changing_a_copy_leaves_the_original(tensor):
    other = tensor.clone()
    torch.foo.set_backend_meta(other, 5, 5)
    assert torch.foo.get_backend_meta(tensor) == (3, -29)


def test_results_of_operators_have_none(tensor):
    assert torch.foo.get_backend_meta(tensor + 1) is None


def test_file_for_the_cpu(tensor):
    loaded = saved_and_loaded(tensor, map_location="cpu")
    assert loaded.device.type == "cpu"
    assert torch.equal(loaded, tensor.cpu())


def test_only_tensors_of_foo_take_it():
    with pytest.raises(ValueError, match="foo: tensor must be dense and on foo, got one on cpu"):
        torch.foo.set_backend_meta(torch.ones(2), 1, 2)


FLAGS = {"version_number": True, "format_number": True, "packed": False}


def flags_of(tensor):
    return torch._utils.get_tensor_metadata(tensor)


def test_flags_that_torch_sets():
    tensor = torch.rand(3, 3, device="foo")
    assert flags_of(tensor) == {}
    torch._utils.set_tensor_metadata(tensor, FLAGS)
    assert flags_of(tensor) == flags_of(tensor[1:]) == flags_of(tensor.t()) == FLAGS
    for same in (tensor.clone(), tensor.to("foo:1"), copy.deepcopy(tensor),
                 saved_and_loaded(tensor), saved_and_loaded(tensor, map_location="foo:1"),
                 tensor.cpu().foo()):  # fmt: skip
        assert flags_of(same) == FLAGS
        assert torch.equal(same.cpu(), tensor.cpu())
    assert flags_of(saved_and_loaded(tensor, map_location="cpu")) == {}
    torch._utils.set_tensor_metadata(tensor, {"other": True})
    assert flags_of(tensor) == {"other": True}
    assert flags_of(tensor * 2) == {}


def test_flags_beside_numbers_and_pending_operations(tensor):
    metadata = flags_of(tensor)
    torch._utils.set_tensor_metadata(tensor, metadata | {"packed": True})
    assert torch.foo.get_backend_meta(tensor) == (3, -29)
    torch.foo.set_backend_meta(tensor, 7, 8)
    assert flags_of(tensor)["packed"]
    both = torch.ones(2, dtype=torch.complex64, device="foo")
    torch._utils.set_tensor_metadata(both, FLAGS)
    first, second = saved_and_loaded([both, both.conj()])
    assert second.is_conj()
    assert flags_of(first) == FLAGS
    assert flags_of(second) == FLAGS | {"conj": True}


def test_a_file_with_other_numbers():
    tensor = torch.ones(2, device="foo")
    message = "foo: backend metadata in a file must be two numbers, got 'foo.backend_meta 1 x'"
    with pytest.raises(RuntimeError, match=message):
        torch._utils.set_tensor_metadata(tensor, {"foo.backend_meta 1 x": True})
