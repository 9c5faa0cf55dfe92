"""Graphs on foo that Inductor compiles to C++, just in time and ahead of time."""

import pytest
import torch
import torch.nn.functional as F
from support import squash_operator  # noqa: F401
from support.exact import assert_near, exact_copy
from support.processes import python
from torch import nn

import foo_ops

pytestmark = pytest.mark.needs_compiler


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def cpp_wrapper():
    import torch._inductor.config as config

    with config.patch(cpp_wrapper=True):
        yield


class Model(nn.Module):
    """Runs kernels of Inductor, of torch, of foo_ops and of a user."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(16, 48)
        # Larger than the constants that torch writes into the code: those cannot be replaced.
        self.output = nn.Linear(16, 12)
        self.weight = nn.Parameter(torch.rand(16))

    def forward(self, x):
        heads = self.heads(x).unflatten(-1, (2, 24)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, -1), is_causal=True)
        also_mixed = foo_ops.attention(*heads.chunk(3, -1))
        x = x + (mixed + also_mixed).transpose(1, 2).flatten(2)
        x = torch.ops.squash.squash(foo_ops.rms_norm(x, self.weight), by=3.0)
        return self.output(F.gelu(x))


def exact_result(model, x):
    """Compute the model with torch's own operators in float64."""
    twin = model if model.weight.dtype == torch.float64 else exact_copy(model)
    heads = twin.heads(x.cpu().double()).unflatten(-1, (2, 24)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(*heads.chunk(3, -1), is_causal=True)
    also_mixed = F.scaled_dot_product_attention(*heads.chunk(3, -1))
    x = x.cpu().double() + (mixed + also_mixed).transpose(1, 2).flatten(2)
    x = F.rms_norm(x, (16,), twin.weight, eps=1e-6)
    return twin.output(F.gelu(x / (3 + x.abs())))


@pytest.mark.whole
@pytest.mark.usefixtures("cpp_wrapper")
def test_training():
    model = Model().to("foo:1")
    x = torch.randn(3, 5, 16, device="foo:1")
    result = torch.compile(model, fullgraph=True)(x)
    twin = exact_copy(model)
    expected = exact_result(twin, x)
    assert_near(result, expected)
    expected.square().sum().backward()
    result.square().sum().backward()
    for parameter, exact in zip(model.parameters(), twin.parameters()):
        assert parameter.grad.device == torch.device("foo:1")
        assert_near(parameter.grad, exact.grad)


@pytest.mark.whole
@pytest.mark.usefixtures("cpp_wrapper")
def test_results_and_inputs_on_both_devices():
    def function(x, host, number):
        x[1:].mul_(2)
        made = torch.arange(3, device="foo:1")
        return x.view(2, 6), (x + made).cpu() * 2, host + 1, made, host.to("foo:1"), number * 2

    x = torch.arange(12.0, device="foo:1").view(4, 3)
    host = torch.ones(2)
    expected = function(x.clone(), host, 3)
    results = torch.compile(function, fullgraph=True, dynamic=True)(x, host, 3)
    for actual, other in zip(results[:-1], expected):
        assert actual.device == other.device
        assert torch.equal(actual, other)
    assert results[-1] == 6
    assert results[0].data_ptr() == x.data_ptr()
    assert x[1].tolist() == [6, 8, 10]


@pytest.mark.whole
@pytest.mark.usefixtures("cpp_wrapper")
def test_two_devices_are_refused():
    def function(x):
        return (x + 1).to("foo:1")

    message = "cpp_wrapper: a graph must be on one device of foo, got foo:0 and foo:1"
    with pytest.raises(Exception, match=message):
        torch.compile(function)(torch.ones(3, device="foo"))


@pytest.mark.whole
@pytest.mark.usefixtures("cpp_wrapper")
def test_memory_of_results_is_that_of_foo():
    function = torch.compile(lambda x: x * 2)
    x = torch.ones(1 << 16, device="foo")
    before = torch.foo.memory_allocated()
    result = function(x)
    assert torch.foo.memory_allocated() - before >= result.nbytes


@pytest.fixture(scope="module", params=["cpu", "foo"])
def package(request, tmp_path_factory):
    torch.manual_seed(0)
    model = Model().to(request.param).eval()
    x = torch.randn(3, 5, 16, device=request.param)
    shapes = ({1: torch.export.Dim("length", min=2, max=1024)},)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return model, str(path)


@pytest.mark.whole
def test_package(package):
    model, path = package
    device = model.weight.device
    loaded = torch._inductor.aoti_load_package(path)
    for length in (5, 9, 64):
        x = torch.randn(3, length, 16, device=device)
        result = loaded(x)
        assert result.device == device
        assert_near(result, exact_result(model, x))


@pytest.mark.whole
def test_package_in_a_fresh_process(package, tmp_path):
    model, path = package
    x = torch.randn(3, 7, 16)
    torch.save((x, exact_result(model, x)), tmp_path / "data.pt")
    program = f"""
import torch
from support import squash_operator
x, expected = torch.load({str(tmp_path / "data.pt")!r})
result = torch._inductor.aoti_load_package({path!r})(x.to({str(model.weight.device)!r}))
torch.testing.assert_close(result.cpu().double(), expected, rtol=1e-5, atol=1e-5)
"""
    process = python(program)
    assert process.returncode == 0, process.stderr


@pytest.mark.whole
def test_package_on_another_device(package):
    model, path = package
    if model.weight.device.type != "foo":
        pytest.skip("the CPU is one device")
    loaded = torch._inductor.aoti_load_package(path, device_index=1)
    x = torch.randn(3, 5, 16, device="foo:1")
    result = loaded(x)
    assert result.device == torch.device("foo:1")
    assert_near(result, exact_result(model, x))
    message = "Expected all tensors to be on the same device, .* foo:1 and foo:0"
    with pytest.raises(RuntimeError, match=message):
        loaded(x.to("foo:0"))


@pytest.mark.whole
@pytest.mark.parametrize("user_managed", [False, True])
def test_new_weights_of_a_package(package, user_managed):
    """Weights are on the host, where the graph runs."""
    model, path = package
    loaded = torch._inductor.aoti_load_package(path)
    x = torch.randn(3, 5, 16, device=model.weight.device)
    other = Model().eval()
    loaded.load_constants(
        dict(other.named_parameters()), check_full_update=True, user_managed=user_managed
    )
    assert_near(loaded(x), exact_result(other, x))
