"""What holds for every operator, on cpu and on foo: one table, one matrix."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from foo_ops import library, testing
from foo_ops.testing import LAYOUTS, OPERATORS
from foo_ops.testing.layouts import inside_padding, reversed_dimensions

pytestmark = pytest.mark.usefixtures("one_thread")


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def cases(names, dtypes=lambda spec: spec.dtypes):
    """Parametrise over operators, their dtypes and their samples."""
    return pytest.mark.parametrize(
        ("spec", "dtype", "name"),
        [
            pytest.param(spec, dtype, name, id=f"{spec.name}-{dtype_name(dtype)}-{name}")
            for spec in OPERATORS
            for dtype in dtypes(spec)
            for name in names(spec)
        ],
    )


def double_precision(spec):
    return [dtype for dtype in spec.dtypes if dtype in (torch.float64, torch.complex128)]


def first_dtype(spec):
    return spec.dtypes[:1]


def first_and_last_dtype(spec):
    """The last is the one that lies farthest from the first."""
    return spec.dtypes[0], spec.dtypes[-1]


every_sample = cases(lambda spec: spec.samples)
every_essential_sample = cases(lambda spec: spec.essential)
every_operator = pytest.mark.parametrize("spec", OPERATORS, ids=lambda spec: spec.name)


def backward(sample, outputs, cotangents):
    return torch.autograd.grad(outputs, sample.differentiable(), cotangents)


def same(actual, expected, *, check_stride=True):
    """Bit for bit, dtypes and layouts included, but for the payload of a NaN."""
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, equal_nan=True, check_stride=check_stride
    )


@every_sample
def test_values(spec, dtype, name, device):
    sample = spec.samples[name](dtype)
    outputs = sample.to(device).call(spec.operator)
    assert all(output.device.type == device for output in outputs)
    testing.check_outputs(spec, sample, dtype, outputs)


@pytest.mark.usefixtures("poisoned_memory")
@every_sample
def test_gradients(spec, dtype, name, device):
    sample = spec.samples[name](dtype).to(device).requiring_grad()
    outputs = sample.call(spec.operator)
    testing.check_outputs(spec, sample, dtype, outputs)
    cotangents = testing.cotangents_for(outputs)
    gradients = backward(sample, outputs, cotangents)
    for gradient, tensor in zip(gradients, sample.differentiable()):
        assert (gradient.dtype, gradient.device) == (tensor.dtype, tensor.device)
    testing.check_gradients(spec, sample, gradients, cotangents)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@cases(lambda spec: spec.in_layouts)
def test_layouts(spec, dtype, name, layout, device):
    """Values and gradients of tensors that are not contiguous; a read beside them gives NaN."""
    sample = spec.samples[name](dtype).map(layout).to(device).requiring_grad()
    outputs = sample.call(spec.operator)
    testing.check_outputs(spec, sample, dtype, outputs)
    cotangents = tuple(layout(cotangent) for cotangent in testing.cotangents_for(outputs))
    gradients = backward(sample, outputs, cotangents)
    testing.check_gradients(spec, sample, gradients, cotangents)


@every_essential_sample
def test_gradient_of_each_input_alone(spec, dtype, name, device):
    """Which inputs need a gradient decides who computes, and never what comes out."""
    sample = spec.samples[name](dtype).to(device).requiring_grad()
    outputs = sample.call(spec.operator)
    cotangents = testing.cotangents_for(outputs)
    tensors = sample.differentiable()
    expected = backward(sample, outputs, cotangents)
    for tensor, gradient in zip(tensors, expected):
        for other in tensors:
            other.requires_grad_(other is tensor)
        alone = sample.call(spec.operator)
        same(alone, outputs)
        same(backward(sample, alone, cotangents), (gradient,))


@every_essential_sample
def test_gradient_through_each_output_alone(spec, dtype, name, device):
    """An output that nothing depends on has no gradient: as good as one of zeros."""
    sample = spec.samples[name](dtype).to(device).requiring_grad()
    count = len(sample.call(spec.operator))
    for position in range(count):
        outputs = sample.call(spec.operator)
        chosen = testing.cotangents_for(outputs)[position]
        gradients = backward(sample, outputs[position], chosen)
        cotangents = tuple(
            chosen if index == position else torch.zeros_like(output)
            for index, output in enumerate(outputs)
        )
        testing.check_gradients(spec, sample, gradients, cotangents)


@every_essential_sample
def test_gradient_only_where_one_is_needed(spec, dtype, name, device):
    sample = spec.samples[name](dtype).to(device)
    outputs = sample.call(spec.operator)
    assert not any(output.requires_grad for output in outputs)
    sample = sample.requiring_grad()
    assert all(output.requires_grad for output in sample.call(spec.operator))
    with torch.no_grad():
        without = sample.call(spec.operator)
    with torch.inference_mode():
        inference = sample.call(spec.operator)
    assert all(output.is_inference() for output in inference)
    for results in (without, inference):
        assert not any(output.requires_grad for output in results)
        same(tuple(output.clone() for output in results), outputs)


def finite(outputs):
    """Numerical derivatives know no infinity."""
    return tuple(output.where(output.isfinite(), 0) for output in outputs)


@cases(lambda spec: spec.essential, double_precision)
def test_gradcheck(spec, dtype, name, device):
    sample = spec.samples[name](dtype).to(device).requiring_grad()
    tensors = sample.differentiable()

    def function(*values):
        replaced = dict(zip(map(id, tensors), values))
        return finite(sample.map(lambda t: replaced.get(id(t), t)).call(spec.operator))

    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no gradient", "gradient"])
@cases(lambda spec: spec.essential, first_and_last_dtype)
def test_opcheck(spec, dtype, name, requires_grad, device):
    sample = spec.samples[name](dtype).to(device)
    if requires_grad:
        sample = sample.requiring_grad()
    results = library.opcheck(spec.operator, sample.inputs, dict(sample.keywords))
    assert results == dict.fromkeys(results, "SUCCESS")
    assert len(results) == 4


def check_fake(spec, sample):
    """Shape, dtype, device and strides."""
    with FakeTensorMode() as mode:
        fakes = sample.map(mode.from_tensor).call(spec.operator)
    for output, fake in zip(sample.call(spec.operator), fakes):
        assert output.shape == fake.shape
        assert output.dtype == fake.dtype
        assert output.device == fake.device
        assert output.stride() == fake.stride()
        assert output.is_contiguous() == fake.is_contiguous()


@every_sample
def test_fake_kernel_agrees(spec, dtype, name, device):
    check_fake(spec, spec.samples[name](dtype).to(device))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@cases(lambda spec: spec.in_layouts, first_dtype)
def test_fake_kernel_agrees_in_layouts(spec, dtype, name, layout, device):
    check_fake(spec, spec.samples[name](dtype).map(layout).to(device))


def compiled(spec, device, **options):
    """The operator between others, so that there is a graph around it."""

    def function(inputs, keywords):
        doubled = [
            tensor * 2 if tensor is not None and tensor.is_floating_point() else tensor
            for tensor in inputs
        ]
        outputs = spec.operator(*doubled, **keywords)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        return tuple(output * 2 for output in outputs)

    backend = "inductor" if device == "cpu" else "aot_eager"
    return function, torch.compile(function, backend=backend, fullgraph=True, **options)


def check_compiled(spec, sample, eager, graph):
    """Forward with and without gradients, and backward. A gradient may have any layout."""
    outputs, gradients = [], []
    for function in (eager, graph):
        leaves = sample.requiring_grad()
        recorded = function(leaves.inputs, leaves.keywords)
        gradients.append(backward(leaves, recorded, testing.cotangents_for(recorded)))
        with torch.no_grad():
            unrecorded = function(sample.inputs, sample.keywords)
        outputs.append(tuple(output.detach() for output in (*recorded, *unrecorded)))
    same(outputs[1], outputs[0])
    same(gradients[1], gradients[0], check_stride=False)


@pytest.mark.usefixtures("fresh_compiler")
@cases(lambda spec: spec.essential, first_dtype)
def test_compiled(spec, dtype, name, device):
    sample = spec.samples[name](dtype).to(device)
    check_compiled(spec, sample, *compiled(spec, device, dynamic=False))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("layout", [reversed_dimensions, inside_padding])
@every_operator
def test_compiled_for_layouts(spec, layout, device):
    dtype = spec.dtypes[0]
    sample = spec.sized(dtype, 6).map(layout).to(device)
    check_compiled(spec, sample, *compiled(spec, device, dynamic=False))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@every_operator
def test_compiled_for_dynamic_shapes(spec, dtype, device):
    """One graph serves all sizes."""
    functions = compiled(spec, device, dynamic=True)
    check_compiled(spec, spec.sized(dtype, 9).to(device), *functions)
    with torch.compiler.set_stance("fail_on_recompile"):
        for size in (6, 19):
            check_compiled(spec, spec.sized(dtype, size).to(device), *functions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@every_operator
def test_same_bits_for_any_number_of_threads(spec, dtype, device):
    sample = spec.large(dtype).to(device).requiring_grad()
    results = []
    for threads in (1, 2, 3, 3):
        torch.set_num_threads(threads)
        outputs = sample.call(spec.operator)
        gradients = backward(sample, outputs, testing.cotangents_for(outputs))
        results.append(tuple(tensor.detach() for tensor in (*outputs, *gradients)))
    for result in results[1:]:
        same(result, results[0])


@every_operator
def test_second_device(spec):
    sample = spec.sized(spec.dtypes[0], 5)
    expected = sample.call(spec.operator)
    outputs = sample.to("foo:1").call(spec.operator)
    assert all(output.device == torch.device("foo:1") for output in outputs)
    same(tuple(output.cpu() for output in outputs), expected)
