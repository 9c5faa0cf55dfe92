"""FakeTensor and torch.compile support device foo."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.exact import assert_near, exact_copy
from support.parts import whole
from torch import nn
from torch._subclasses import FakeTensorMode


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 4)

    def forward(self, x):
        hidden = F.dropout(F.gelu(self.norm(self.hidden(x))), 0.5, self.training)
        return self.output(hidden).softmax(-1)


def test_fake_tensors():
    with FakeTensorMode():
        tensor = torch.ones(2, 3, device="foo:1")
        result = (tensor @ tensor.T).sum()
        assert result.device == torch.device("foo:1")
        assert torch.empty(3, device="foo").device == torch.device("foo:0")
        assert (tensor + torch.tensor(1.0)).device == torch.device("foo:1")
        message = "Expected all tensors to be on the same device, but found at least two devices"
        with pytest.raises(RuntimeError, match=message):
            tensor + torch.ones(2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_training(dynamic, dtype):
    model = Model().to("foo:1", dtype)
    twin = copy.deepcopy(model)
    function = compiled(model, dynamic=dynamic)
    for batch in (3, 5, 7):
        data = torch.randn(batch, 4, device="foo:1", dtype=dtype)
        results = []
        for each in (function, twin):
            torch.manual_seed(1)
            output = each(data)
            output[:, 0].sum().backward()
            results.append(output)
        assert torch.equal(*results)
    for actual, expected in zip(model.parameters(), twin.parameters()):
        assert torch.equal(actual.grad, expected.grad)


def test_dynamic_shapes_compile_once():
    function = compiled(lambda x: x.sin() + x.shape[0], dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (3, 4, 9):
            tensor = torch.rand(size, device="foo")
            assert torch.equal(function(tensor), tensor.sin() + size)


def test_factories_and_transfers():
    def function(x):
        made = torch.arange(3, device=x.device) + torch.zeros(3, device="foo")
        there = (x + made).foo(1) + torch.tensor(2.0, device="foo:1")
        return there, there.cpu() + 1, x.is_foo, x.device.index

    tensor = torch.ones(3, device="foo")
    there, back, is_foo, index = compiled(function)(tensor)
    assert there.device == torch.device("foo:1")
    assert back.tolist() == [4, 5, 6]
    assert (is_foo, index) == (True, 0)


INDUCTOR = pytest.param("inductor", marks=pytest.mark.needs_compiler)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_numbers_in_tensors(backend):
    """A number on foo may give the start of a slice, and another number recompiles nothing."""

    def function(x, start):
        return torch.narrow(x, 0, start, 2) * 2, x.narrow(1, start, 1), start + 1

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    x = torch.arange(12.0, device="foo").view(4, 3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for position in (1, 2, 0):
            start = torch.tensor(position, device="foo")
            for actual, expected in zip(compiled(x, start), function(x.cpu(), position)):
                assert torch.equal(torch.as_tensor(actual).cpu(), torch.as_tensor(expected))
    with pytest.raises(RuntimeError, match="start"):
        torch.narrow(x, 0, torch.tensor([1], device="foo"), 2)
    assert torch.narrow(x, 0, torch.tensor(-1, device="foo"), 1).tolist() == [[9, 10, 11]]


@pytest.mark.needs_compiler
def test_written_numbers():
    """A graph that writes a number reads the new value, not the input's."""

    def function(x, start):
        start.add_(1)
        return x[start.item() :].clone()

    x = torch.arange(4.0, device="foo")
    start = torch.tensor(1, device="foo")
    assert torch.compile(function)(x, start).tolist() == [2, 3]
    assert start.item() == 2


def test_device_functions():
    def function(x):
        with torch.foo.device(1):
            made = torch.ones(3, device="foo:1")
        torch.foo.synchronize()
        return x + made + torch.foo.current_device() + torch.foo.device_count()

    assert compiled(function)(torch.ones(3, device="foo:1")).tolist() == [4, 4, 4]
    assert torch.foo.current_device() == 0


def test_convolution_and_attention():
    convolution = nn.Conv2d(3, 4, 3).foo()
    image = torch.randn(2, 3, 5, 5, device="foo", requires_grad=True)
    assert torch.equal(compiled(convolution)(image), convolution(image))
    query = torch.randn(2, 2, 8, 4, device="foo", requires_grad=True)

    def attention(q):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    (expected,) = torch.autograd.grad(attention(query).square().sum(), query)
    (actual,) = torch.autograd.grad(compiled(attention)(query).square().sum(), query)
    assert torch.equal(actual, expected)


def test_in_place_and_views():
    def function(x):
        x[1:].mul_(2)
        return x.view(2, 2).t()

    tensor = torch.ones(4, device="foo")
    result = compiled(function)(tensor)
    assert tensor.tolist() == [1, 2, 2, 2]
    assert result.data_ptr() == tensor.data_ptr()


def test_optimizer_step():
    model = Model().foo()
    optimizer = torch.optim.AdamW(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        model(torch.randn(3, 4, device="foo"))[:, 0].sum().backward()
        step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_device_interface():
    from torch._dynamo.device_interface import get_interface_for_device

    interface = get_interface_for_device("foo")
    assert interface is get_interface_for_device("foo:1")
    assert interface.is_available()
    assert interface.device_count() == 2
    assert interface.Worker.get_device_properties("foo").multi_processor_count > 0
    with torch._dynamo.device_interface.DeviceGuard(interface, 1):
        assert interface.current_device() == 1
    assert interface.current_device() == 0


def test_export():
    model = Model().foo().eval()
    data = torch.randn(3, 4, device="foo")
    program = torch.export.export(model, (data,))
    assert torch.equal(program.module()(data), model(data))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.heads = nn.Linear(16, 48)
        self.output = nn.Sequential(nn.GELU(), nn.Linear(16, 4), nn.LogSoftmax(-1))

    def forward(self, x):
        heads = self.heads(self.norm(x)).unflatten(-1, (2, 24)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, -1), is_causal=True)
        return self.output(x + mixed.transpose(1, 2).flatten(2))


@pytest.mark.needs_compiler
@pytest.mark.parametrize("dynamic", [False, *whole(True)])
def test_training_with_inductor(dynamic):
    """Kernels that Inductor writes for the CPU run on memory of foo."""
    model = Attention().to("foo:1")
    twin = exact_copy(model)
    function = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for length in (5, 7) if dynamic else (5,):
        data = torch.randn(3, length, 16, device="foo:1")
        for each, batch in ((function, data), (twin, data.cpu().double())):
            each(batch)[..., 0].sum().backward()
        for actual, expected in zip(model.parameters(), twin.parameters()):
            assert actual.grad.device == torch.device("foo:1")
            assert_near(actual.grad, expected.grad)


@pytest.mark.needs_compiler
def test_functions_with_inductor():
    """Branches, random numbers and results on both devices compile.

    Graphs for the CPU are as before.
    """

    def function(x):
        branch = torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x * 2, (x,))
        return branch, F.dropout(x, 0.5), (x * 2).cpu() + 1, x.softmax(-1).amax()

    compiled = torch.compile(function, fullgraph=True)
    for tensor in (torch.ones(100, device="foo:1"), -torch.ones(100, device="foo:1")):
        branch, dropped, moved, largest = compiled(tensor)
        expected = function(tensor.cpu().double())
        assert_near(branch, expected[0])
        assert set(dropped.abs().tolist()) == {0, 2}
        assert dropped.device == torch.device("foo:1")
        assert_near(moved, expected[2])
        assert_near(largest, expected[3])
    assert torch.equal(torch.compile(lambda x: x * 2 + 1)(torch.ones(3)), torch.full((3,), 3.0))


@pytest.mark.needs_compiler
def test_optimizer_with_inductor():
    compiled, exact = (
        torch.ones(5, device=device, dtype=dtype, requires_grad=True)
        for device, dtype in (("foo", torch.float32), ("cpu", torch.float64))
    )
    for parameter in (compiled, exact):
        parameter.grad = torch.ones_like(parameter)
        step = torch.optim.AdamW([parameter]).step
        (torch.compile(step) if parameter is compiled else step)()
    assert_near(compiled.detach(), exact.detach())
    assert compiled[0] < 1


@pytest.mark.needs_compiler
@pytest.mark.parametrize("device", ["cpu", "foo:1"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"epilogue_fusion": False}}],
    ids=["default", "mode", "options"],
)
def test_backend_of_its_own(settings, device):
    assert "foo" in torch._dynamo.list_backends()
    model = Attention().to(device)
    twin = exact_copy(model)
    data = torch.randn(3, 5, 16, device=device)
    function = torch.compile(model, backend="foo", fullgraph=True, **settings)
    function(data)[..., 0].sum().backward()
    twin(data.cpu().double())[..., 0].sum().backward()
    for actual, expected in zip(model.parameters(), twin.parameters()):
        assert_near(actual.grad, expected.grad)


@pytest.mark.needs_compiler
def test_settings_of_the_backend_reach_inductor():
    from torch._inductor.utils import run_and_get_code

    def code(**settings):
        torch._dynamo.reset()
        function = torch.compile(lambda x: x.sin() + 1, backend="foo", **settings)
        result, (source,) = run_and_get_code(function, torch.ones(3, device="foo"))
        assert result.device == torch.device("foo:0")
        return source

    assert "assert_size_stride" in code()
    assert "assert_size_stride(" not in code(options={"size_asserts": False}).split("def call")[1]


def test_errors_of_the_backend():
    def run(**settings):
        torch.compile(lambda x: x + 1, backend="foo", **settings)(torch.ones(3, device="foo"))

    refused = torch._dynamo.exc.BackendCompilerFailed
    with pytest.raises(refused, match="Unexpected optimization option no_such_option, known"):
        run(options={"no_such_option": 1})
    with pytest.raises(refused, match="Unexpected type of attr epilogue_fusion, got int should be"):
        run(options={"epilogue_fusion": 3})
    with pytest.raises(refused, match="Unrecognized mode=fastest, should be one of"):
        run(mode="fastest")
