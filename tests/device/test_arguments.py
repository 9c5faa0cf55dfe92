"""Operators with a device argument put their results on that device."""

import pytest
import torch


def dense(device):
    return torch.arange(6.0).view(2, 3).t().to(device)


def coo(device):
    return torch.eye(3).to(device).to_sparse()


def csr(device):
    return torch.eye(3).to(device).to_sparse_csr()


def nested(device):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).to(device)


def quantized(device):
    return torch.quantize_per_tensor(torch.ones(3, device=device), 0.5, 1, torch.quint8)


TENSORS = [dense, coo, csr, nested, quantized]

# Nested tensors of quantized tensors exist on foo alone. The others take a column of the argument.
WITHOUT_QUANTIZED = ["nested_tensor", "sparse_coo_tensor", "sparse_csr_tensor"]

library = torch.library.Library("device_arguments", "FRAGMENT")
library.define("like(Tensor x, *, Device device) -> Tensor")
library.impl("like", lambda x, device: torch.full(x.shape, 3.0, device=device), "CPU")
library.define("maybe_like(Tensor x, *, Device? device=None) -> (Tensor, Tensor[])")
library.impl(
    "maybe_like",
    lambda x, device=None: (torch.ones(2, device=device), [torch.zeros(2, device=device)]),
    "CPU",
)

OPERATORS = {
    "empty_like": torch.empty_like,
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x, device: torch.full_like(x, 2, device=device),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x, device: torch.randint_like(x, 5, device=device),
    "randint_like.Tensor": lambda x, device: torch.ops.aten.randint_like(
        x, torch.tensor(5), device=device
    ),
    "new_empty": lambda x, device: x.new_empty(3, device=device),
    "new_empty_strided": lambda x, device: x.new_empty_strided((3,), (2,), device=device),
    "new_zeros": lambda x, device: x.new_zeros(3, device=device),
    "new_ones": lambda x, device: x.new_ones(3, device=device),
    "new_full": lambda x, device: x.new_full((3,), 2, device=device),
    "new_tensor": lambda x, device: x.new_tensor([1.0, 2], device=device),
    "to": lambda x, device: x.to(device=device),
    "to with dtype": lambda x, device: x.to(device, torch.float64),
    "to with copy": lambda x, device: x.to(device, copy=True),
    "_to_copy": lambda x, device: torch.ops.aten._to_copy(x, device=device),
    "device_put": lambda x, device: torch.ops.prims.device_put(x, torch.device(device)),
    "linspace": lambda x, device: torch.linspace(x.sum(), 9, 4, device=device),
    "logspace": lambda x, device: torch.logspace(0, x.sum(), 4, device=device),
    "sparse_coo_tensor": lambda x, device: torch.sparse_coo_tensor(
        torch.zeros(1, 3, dtype=torch.long, device=x.device), x[:, 0], (4,), device=device
    ),
    "sparse_csr_tensor": lambda x, device: torch.sparse_csr_tensor(
        torch.tensor([0, 3], device=x.device),
        torch.arange(3, device=x.device),
        x[:, 0],
        device=device,
    ),
    "tensor": lambda x, device: torch.tensor(x, device=device),
    "asarray": lambda x, device: torch.asarray(x, device=device),
    "is_pinned": lambda x, device: x.is_pinned(device),
    "nested_tensor": lambda x, device: torch.nested.nested_tensor([x, x], device=device),
    "kernel of a user": lambda x, device: torch.ops.device_arguments.like(x, device=device),
    "results of a user": lambda x, device: torch.ops.device_arguments.maybe_like(x, device=device),
}


CASES = [
    (name, tensor)
    for name in OPERATORS
    for tensor in TENSORS
    if not (tensor is quantized and name in WITHOUT_QUANTIZED)
]


def describe(results, own_device, name):
    """Return device, layout, dtype and shape; ``name`` replaces the argument's device."""
    if isinstance(results, (list, tuple)):
        return [describe(each, own_device, name) for each in results]
    if not isinstance(results, torch.Tensor):
        return results
    device = name if str(results.device) == own_device else str(results.device)
    shape = results.size(0) if results.is_nested else tuple(results.shape)
    return device, results.layout, results.dtype, shape


def outcome(operator, tensor, device, name):
    try:
        return describe(operator(tensor, device=device), str(tensor.device), name)
    except (RuntimeError, AssertionError, ImportError, TypeError, ValueError) as error:
        return "refused" if str(error) else "refused without a word"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "tensor"), CASES)
def test_devices_without_memory_of_foo(name, tensor):
    operator = OPERATORS[name]
    for device in ("cpu", "meta", "cuda", "xpu", "mps", "hpu"):
        own = "cpu" if device == "cpu" else "own"
        expected = outcome(operator, tensor("cpu"), device, own)
        assert outcome(operator, tensor("foo:1"), device, own) == expected, device


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "tensor"), CASES)
def test_devices_of_foo(name, tensor):
    operator = OPERATORS[name]
    for device, index in (("foo", 0), ("foo:0", 0), ("foo:1", 1)):
        expected = outcome(operator, tensor("cpu"), "cpu", f"foo:{index}")
        # The current device of new_tensor is the argument's device, as on CUDA.
        arguments = ["foo:0"] if (name, device) == ("new_tensor", "foo") else ["foo:0", "foo:1"]
        for argument in arguments:
            assert outcome(operator, tensor(argument), device, argument) == expected, (
                argument,
                device,
            )


@pytest.mark.parametrize("device", ["foo:2", "foo:9"])
def test_a_device_that_does_not_exist(device):
    message = f"foo: device index must be from 0 to 1, got {device[-1]}"
    for name, operator in OPERATORS.items():
        if name == "is_pinned":
            continue
        with pytest.raises(RuntimeError, match=message):
            operator(torch.ones(3, 3, device="foo"), device=device)


def test_the_current_device():
    with torch.foo.device(1):
        for name in ("empty_like", "kernel of a user", "to"):
            assert OPERATORS[name](torch.ones(3, device="foo:0"), device="foo").device.index == 1
        assert torch.ones_like(torch.ones(3, device="foo:0")).device.index == 0
