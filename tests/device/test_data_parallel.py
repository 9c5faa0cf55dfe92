"""torch.nn.DataParallel and its functions, on the two devices of foo."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 2)).double()


@pytest.mark.parametrize("batch", [8, 5, 1])
def test_a_model_gives_what_it_gives_on_one_device(batch):
    x = torch.rand(batch, 5, dtype=torch.float64)
    expected_model, parallel = model().eval(), nn.DataParallel(model().eval().to("foo"))
    assert parallel.device_ids == [0, 1]
    expected, actual = expected_model(x), parallel(x.to("foo"))
    assert actual.device == torch.device("foo:0")
    torch.testing.assert_close(actual.cpu(), expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    for one, other in zip(parallel.module.parameters(), expected_model.parameters()):
        torch.testing.assert_close(one.grad.cpu(), other.grad)


def test_both_devices_compute():
    devices = []

    class Recording(nn.Module):
        def forward(self, x):
            devices.append((x.device.index, torch.foo.current_device()))
            return x

    nn.DataParallel(Recording())(torch.rand(4, 2))
    assert sorted(devices) == [(0, 0), (1, 1)]


def test_input_of_the_cpu_and_results_on_another_device():
    parallel = nn.DataParallel(model().eval().to("foo:1"), [1, 0], output_device=0)
    x = torch.rand(6, 5, dtype=torch.float64)
    result = parallel(x)
    assert result.device == torch.device("foo:0")
    torch.testing.assert_close(result.cpu(), model().eval()(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.bfloat16])
def test_scatter_and_gather(dtype):
    x = torch.arange(20).reshape(4, 5).t().to(dtype)
    for source in (x, x.to("foo"), x.to("foo:1")):
        parts = nn.parallel.scatter(source, [0, 1])
        assert [part.device.index for part in parts] == [0, 1]
        assert [len(part) for part in parts] == [3, 2]
        assert torch.equal(torch.cat([part.cpu() for part in parts]), x)
        assert torch.equal(nn.parallel.gather(parts, "cpu"), x)
        back = nn.parallel.gather(parts, 1)
        assert back.device == torch.device("foo:1")
        assert torch.equal(back.cpu(), x)
    nested = nn.parallel.scatter({"x": x, "name": ["a"]}, [1, 0], dim=1)
    assert [each["x"].shape for each in nested] == [(5, 2), (5, 2)]
    assert nested[1]["name"] == ["a"]


def test_gradients_go_back():
    x = torch.rand(4, 3, device="foo", dtype=torch.float64, requires_grad=True)

    def there_and_back(x):
        first, second = nn.parallel.scatter(x, [0, 1])
        return nn.parallel.gather([first * 2, second.sin()], 0)

    assert torch.autograd.gradcheck(there_and_back, x)


def test_chunks_and_out():
    x = torch.arange(6.0)
    first, second = comm.scatter(x, [1, 0], [5, 1])
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3, 4], [5])
    assert (first.device.index, second.device.index) == (1, 0)
    out = [torch.empty(2, device="foo"), torch.empty(4, device="foo:1")]
    assert comm.scatter(x, out=out)[1] is out[1]
    assert out[0].tolist() + out[1].tolist() == x.tolist()
    target = torch.empty(6, device="foo:1")
    assert comm.gather(out, out=target) is target
    assert target.tolist() == x.tolist()
    assert comm.gather(out).device == torch.device("foo:0")


def test_broadcast():
    x, y = torch.rand(3, device="foo"), torch.rand(2, 2, device="foo").bfloat16()
    one, other = comm.broadcast(x, [0, 1])
    assert one is x
    assert other.device == torch.device("foo:1")
    assert torch.equal(other.cpu(), x.cpu())
    copies = comm.broadcast_coalesced([x, y], [0, 1])
    assert copies[0][1] is y
    assert torch.equal(copies[1][1].cpu(), y.cpu())
    out = [torch.empty(3, device="foo"), torch.empty(3, device="foo:1")]
    comm.broadcast(x, out=out)
    assert torch.equal(out[1].cpu(), x.cpu())
    total = comm.reduce_add_coalesced([[x, y], [x.to("foo:1"), y.to("foo:1")]], 0)
    assert torch.equal(total[0], 2 * x)
    assert torch.equal(total[1], 2 * y)


FOO, THERE = torch.ones(2, device="foo"), torch.ones(2, device="foo:1")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: comm.broadcast(THERE, [0, 1]), "^device of src tensor must be first in the "),
        (lambda: comm.broadcast(FOO, []), "^Expected at least one device to broadcast to$"),
        (
            lambda: comm.broadcast(FOO, out=[torch.ones(3, device="foo")]),
            r"the source tensor \(2,\), but output tensor at index 0 has shape \(3,\)$",
        ),
        (
            lambda: comm.broadcast_coalesced([FOO, THERE], [0, 1]),
            r"^all tensors must be on devices\[0\]: foo:0, but tensor at index 1 is on foo:1$",
        ),
        (lambda: comm.scatter(FOO, []), "^Expected at least one device to scatter to$"),
        (lambda: comm.scatter(FOO, out=[]), "^Expected at least one output tensor to scatter to$"),
        (
            lambda: comm.scatter(FOO, [0, 1], [2]),
            r"got len\(devices\) = 2 and len\(chunk_sizes\) = 1$",
        ),
        (lambda: comm.scatter(FOO, [0, 7]), "device index must be from 0 to 1, got 7"),
        (lambda: comm.gather([]), "^Expected at least one tensor to gather from$"),
        (
            lambda: comm.gather([FOO, torch.ones(2)]),
            "^Expected all input tensors to be on foo, but tensor at index 1 has device cpu$",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


def test_a_model_on_the_cpu_runs_there():
    """A program that does not use foo may have such a model, and must still run."""
    x = torch.rand(4, 5, dtype=torch.float64)
    parallel = nn.DataParallel(model().eval())
    assert torch.equal(parallel(x), model().eval()(x))
    message = r"device foo:0 \(device_ids\[0\]\) but found one of them on device: foo:1"
    with pytest.raises(RuntimeError, match=message):
        nn.DataParallel(model().to("foo:1"))(x)


def test_an_error_of_a_replica_comes_back():
    class Fails(nn.Module):
        def forward(self, x):
            if x.device.index == 1:
                raise KeyError("there")
            return x

    with pytest.raises(KeyError, match="Caught KeyError in replica 1 on device 1"):
        nn.DataParallel(Fails())(torch.rand(4, 2))


def test_tensors_of_cuda_go_to_torch_s_own(monkeypatch):
    """Builds of torch for CUDA have their own functions."""
    from foo_ops.device import _registration

    class OnCuda:
        is_cuda = True

    both = _registration._beside(lambda *_: "foo", lambda *_: "cuda")
    assert both([OnCuda()], 0) == "cuda"
    assert both(FOO, [0]) == both([], 0) == "foo"
