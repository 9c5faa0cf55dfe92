"""A tensor bears the numbers of a backend through copies, files and views."""

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
    with pytest.raises(ValueError, match="foo: tensor must be a dense one on foo, got one on cpu"):
        torch.foo.set_backend_meta(torch.ones(2), 1, 2)
