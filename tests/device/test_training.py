"""Autograd and training on device foo match the CPU."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from support.exact import assert_near, exact_copy
from torch import nn
from torch.utils.checkpoint import checkpoint


def results(module, function):
    """Return the terms of the loss, and the gradients."""
    parts = function(module)
    parts.sum().backward()
    return [parts.detach(), *(parameter.grad for parameter in module.parameters())]


def check(module, function):
    """Compare foo with float64 on the CPU."""
    actual = results(copy.deepcopy(module).to("foo:1"), function)
    for each, expected in zip(actual, results(exact_copy(module), function), strict=True):
        assert_near(each, expected)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MODULES = {
    "linear": (nn.Linear(4, 3), (5, 4)),
    "conv1d": (nn.Conv1d(4, 6, 3, groups=2, stride=2), (2, 4, 9)),
    "conv2d": (nn.Conv2d(3, 4, 3, padding=1, dilation=2), (2, 3, 8, 8)),
    "conv3d_no_bias": (nn.Conv3d(2, 3, 2, bias=False), (1, 2, 4, 4, 4)),
    "conv_transpose2d": (nn.ConvTranspose2d(3, 4, 3, stride=2, groups=1), (2, 3, 4, 4)),
    "conv_unbatched": (nn.Conv2d(3, 4, 3), (3, 8, 8)),
    "layer_norm": (nn.LayerNorm(6), (4, 6)),
    "batch_norm": (nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "group_norm": (nn.GroupNorm(2, 4), (3, 4, 5)),
    "rnn": (nn.RNN(4, 5, 2), (6, 3, 4)),
    "lstm": (nn.LSTM(4, 5, 2, bidirectional=True), (6, 3, 4)),
    "lstm_no_bias": (nn.LSTM(4, 5, bias=False, proj_size=2), (6, 3, 4)),
    "lstm_cell": (nn.LSTMCell(4, 5), (3, 4)),
    "gru": (nn.GRU(4, 5, 2, bidirectional=True), (6, 3, 4)),
    "gru_no_bias": (nn.GRU(4, 5, bias=False, batch_first=True), (6, 3, 4)),
    "gru_cell": (nn.GRUCell(4, 5), (3, 4)),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (5, 3, 8)),
    "prelu": (nn.PReLU(3), (2, 3, 4)),
    "bilinear": (nn.Linear(4, 4).double(), (5, 4)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    module, shape = MODULES[name]

    def weighted(module):
        output = module(numbers(*shape).to(next(module.parameters())))
        output = output[0] if isinstance(output, tuple) else output
        return output * numbers(*output.shape, seed=1).to(output)

    check(module, weighted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_scaled_dot_product_attention(dtype, is_causal, masked):
    if masked and is_causal:
        pytest.skip("torch allows one of the two")

    def run(device, compute_dtype):
        query, key, value = (
            numbers(2, 3, 7, 4, seed=seed).to(dtype).to(device, compute_dtype).requires_grad_()
            for seed in range(3)
        )
        mask = numbers(7, 7, seed=4).gt(-1).to(device) if masked else None
        output = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
        output.mul(numbers(2, 3, 7, 4, seed=5).to(device)).sum().backward()
        return [output, query.grad, key.grad, value.grad]

    for actual, expected in zip(run("foo", dtype), run("cpu", torch.float64)):
        assert actual.is_foo
        # Probabilities, scores and sums are each rounded to the dtype on the way.
        tolerance = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(actual.cpu().double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_optimizers(optimizer, options):
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    trained = []
    for twin in (copy.deepcopy(model).to("foo"), exact_copy(model)):
        steps = getattr(torch.optim, optimizer)(twin.parameters(), lr=0.05, **options)
        data = numbers(16, 3).to(next(twin.parameters()))
        losses = []
        for _ in range(5):
            steps.zero_grad()
            loss = (twin(data) - data.sum(1, keepdim=True)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            steps.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        trained.append(nn.utils.parameters_to_vector(twin.parameters()).detach())
    assert_near(*trained)


def test_gradients_to_second_order():
    for function in (
        lambda t: t.sin().prod(),
        lambda t: F.conv1d(t[None, None], t[None, None]).sum(),
    ):
        tensor = numbers(4).double().to("foo").requires_grad_()
        assert torch.autograd.gradcheck(function, (tensor,))
        assert torch.autograd.gradgradcheck(function, (tensor,))


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_cells(cell, bias):
    module = cell(2, 3, bias=bias).double().foo()
    inputs = numbers(2, 2).double().foo().requires_grad_()
    assert torch.autograd.gradcheck(module, (inputs,))
    assert torch.autograd.gradgradcheck(module, (inputs,))


def test_gradient_lives_on_the_device_of_its_tensor():
    a, b = (torch.ones(3, device=f"foo:{index}", requires_grad=True) for index in range(2))
    (a.to("foo:1") * b).sum().cpu().backward()
    assert a.grad.device == torch.device("foo:0")
    assert b.grad.device == torch.device("foo:1")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_repeats_random_numbers(use_reentrant):
    tensor = torch.randn(200, device="foo:1", requires_grad=True)
    output = checkpoint(lambda t: F.dropout(t, 0.5) * 3, tensor, use_reentrant=use_reentrant)
    output.sum().backward()
    assert torch.equal(tensor.grad, output.ne(0) * 6.0)
    assert 0 < output.ne(0).sum().item() < 200


def test_hooks_and_no_grad():
    tensor = torch.ones(3, device="foo", requires_grad=True)
    seen = []
    tensor.register_hook(lambda grad: seen.append(grad.device) or grad * 2)
    (tensor * 3).sum().backward()
    assert tensor.grad.tolist() == [6, 6, 6]
    assert seen == [torch.device("foo:0")]
    with torch.no_grad():
        assert not (tensor * 2).requires_grad
    with torch.inference_mode():
        assert (tensor * 2).is_inference()


def test_anomaly_mode():
    tensor = torch.full((2,), -1.0, device="foo", requires_grad=True)
    with (
        pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
        pytest.raises(RuntimeError, match="returned nan values"),
        torch.autograd.detect_anomaly(check_nan=True),
    ):
        tensor.sqrt().sum().backward()


def test_threads_train_at_once():
    model = nn.Linear(8, 8)
    failures = []

    def squares(module):
        return module(numbers(4, 8).to(module.weight)).square()

    def work():
        try:
            for _ in range(20):
                check(model, squares)
        except AssertionError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_gradient_scaler():
    model = nn.Linear(3, 1).foo()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("foo", init_scale=8.0)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(2, 3, device="foo")).sum()).backward()
    assert model.weight.grad.tolist() == [[16, 16, 16]]
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(model.weight.detach(), before - 0.2)
    model.weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    torch.testing.assert_close(model.weight.detach(), before - 0.2)


def test_modules_keep_their_parameters():
    """Tied weights stay tied, and an optimizer made before the move still works."""
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = model[0].weight
    weight.grad = torch.ones(5, 3)
    before = weight.detach().clone()
    for device in ("foo:1", "cpu", "foo:0", "foo:1"):
        model.to(device)
        assert model[0].weight is model[1].weight is weight
        assert weight.device == weight.grad.device == torch.device(device)
    optimizer.step()
    assert torch.equal(weight.cpu(), before - 1)
    optimizer.zero_grad()
    model(torch.tensor([1], device="foo:1")).sum().backward()
    assert weight.grad.device == torch.device("foo:1")


def test_data_of_another_device():
    tensor = nn.Parameter(torch.ones(3))
    data = torch.arange(4.0, device="foo:1")
    tensor.data = data
    assert (tensor.device, tensor.data_ptr()) == (data.device, data.data_ptr())
    assert tensor.is_leaf
    assert torch.equal(tensor.detach(), data)
    sparse = torch.eye(2, device="foo").to_sparse()
    for other in (tensor, torch.ones(2), torch.eye(2).to_sparse()):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            other.data = sparse
