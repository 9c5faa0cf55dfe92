"""Tensors of foo can be saved, loaded, copied and printed."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


def loaded(buffer, **options):
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, **options)


@pytest.mark.parametrize("source", ["cpu", "foo:0", "foo:1"])
@pytest.mark.parametrize("target", [None, "cpu", "foo", "foo:0", "foo:1"])
def test_map_location(source, target):
    tensor = torch.arange(12.0).reshape(3, 4).t().to(source)
    result = loaded(saved({"tensor": tensor, "view": tensor[1:]}), map_location=target)
    assert result["tensor"].device == torch.device({"foo": "foo:0"}.get(target, target) or source)
    assert torch.equal(result["tensor"].cpu(), tensor.cpu())
    assert result["tensor"].stride() == tensor.stride()
    result["tensor"].zero_()
    assert result["view"].count_nonzero().item() == 0


def test_map_location_by_table_and_function():
    buffer = saved(torch.ones(2, device="foo:1"))
    assert loaded(buffer, map_location={"foo:1": "foo:0"}).device == torch.device("foo:0")
    assert loaded(buffer, map_location={"foo:1": "cpu"}).device == torch.device("cpu")
    assert loaded(buffer, map_location=lambda storage, place: storage).device.type == "cpu"
    assert loaded(buffer, map_location=torch.device("foo", 0)).device == torch.device("foo:0")


def test_missing_device():
    with pytest.raises(RuntimeError, match=r"device 7 but torch.foo.device_count\(\) is 2"):
        loaded(saved(torch.ones(2)), map_location="foo:7")


def test_training_goes_on_after_a_checkpoint():
    def model_and_optimizer(device):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer, device):
        optimizer.zero_grad()
        model(torch.ones(4, 3, device=device)).square().sum().backward()
        optimizer.step()

    model, optimizer = model_and_optimizer("foo:1")
    step(model, optimizer, "foo:1")
    buffer = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer, "foo:1")
    for device in ("cpu", "foo:0"):
        other, other_optimizer = model_and_optimizer(device)
        state = loaded(buffer, map_location=device)
        other.load_state_dict(state["model"])
        other_optimizer.load_state_dict(state["optimizer"])
        step(other, other_optimizer, device)
        torch.testing.assert_close(other.weight.cpu(), model.weight.cpu())


def test_pickle_and_deepcopy():
    tensor = torch.randn(3, device="foo:1", requires_grad=True)
    for twin in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
        assert twin.device == tensor.device
        assert twin.requires_grad
        assert torch.equal(twin, tensor)
        assert twin.data_ptr() != tensor.data_ptr()
    model = nn.Linear(2, 2).foo()
    twin = copy.deepcopy(model)
    assert torch.equal(twin.weight, model.weight)
    assert twin.weight.data_ptr() != model.weight.data_ptr()
    pair = copy.deepcopy([tensor.detach(), tensor.detach()[1:]])
    assert pair[0].untyped_storage().data_ptr() == pair[1].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.arange(3), "tensor([0, 1, 2], device='foo:1')"),
        (lambda: torch.tensor(1.5), "tensor(1.5000, device='foo:1')"),
        (lambda: torch.empty(0), "tensor([], device='foo:1')"),
        (lambda: torch.tensor([True]), "tensor([True], device='foo:1')"),
        (
            lambda: torch.ones(1, dtype=torch.bfloat16),
            "tensor([1.], device='foo:1', dtype=torch.bfloat16)",
        ),
        (lambda: torch.tensor([1 + 2j]), "tensor([1.+2.j], device='foo:1')"),
    ],
)
def test_printing(make, text):
    assert repr(make().to("foo:1")) == text


def test_printing_of_pending_operations():
    assert repr(torch.tensor([1 + 2j], device="foo").conj()) == "tensor([1.-2.j], device='foo:0')"
    parameter = nn.Parameter(torch.ones(1, device="foo"))
    assert repr(parameter) == (
        "Parameter containing:\ntensor([1.], device='foo:0', requires_grad=True)"
    )
    assert f"{torch.ones(1, device='foo') * 1:}" == "tensor([1.], device='foo:0')"
    assert f"{torch.tensor(2.5, device='foo'):.2f}" == "2.50"


def test_data_loader_pins_memory():
    dataset = torch.utils.data.TensorDataset(torch.arange(6.0))
    loader = torch.utils.data.DataLoader(dataset, batch_size=3, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert torch.cat([batch.foo(non_blocking=True) for batch in batches]).tolist() == list(range(6))
