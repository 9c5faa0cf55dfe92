"""Factory functions make tensors on device foo."""

import pytest
import torch

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty(dtype):
    for shape in [(), (0,), (3,), (2, 0, 4), (2, 3, 4)]:
        tensor = torch.empty(shape, dtype=dtype, device="foo:1")
        like = torch.empty(shape, dtype=dtype)
        assert tensor.device == torch.device("foo:1")
        assert tensor.dtype == dtype
        assert (tensor.shape, tensor.stride()) == (like.shape, like.stride())
        assert tensor.untyped_storage().nbytes() == like.untyped_storage().nbytes()


def test_memory_formats():
    shape = (2, 3, 4, 5)
    tensor = torch.empty(shape, device="foo", memory_format=torch.channels_last)
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert torch.empty_like(tensor).stride() == tensor.stride()
    assert torch.ones(shape).to("foo", memory_format=torch.channels_last).stride() == (
        tensor.stride()
    )
    strided = torch.empty_strided((2, 3), (1, 2), device="foo")
    assert strided.stride() == (1, 2)
    assert strided.untyped_storage().nbytes() == 24


FACTORIES = {
    "zeros": lambda **options: torch.zeros(2, 3, **options),
    "ones": lambda **options: torch.ones(2, 3, **options),
    "full": lambda **options: torch.full((2, 3), 7, **options),
    "arange": lambda **options: torch.arange(1, 9, 2, **options),
    "linspace": lambda **options: torch.linspace(0, 1, 5, **options),
    "logspace": lambda **options: torch.logspace(0, 1, 5, **options),
    "eye": lambda **options: torch.eye(3, 4, **options),
    "tensor": lambda **options: torch.tensor([[1, 2], [3, 4]], **options),
    "scalar": lambda **options: torch.tensor(5.5, **options),
    "as_tensor": lambda **options: torch.as_tensor([1.5, 2.5], **options),
    "tril_indices": lambda **options: torch.tril_indices(3, 3, **options),
    "triu_indices": lambda **options: torch.triu_indices(3, 3, **options),
    "hann_window": lambda **options: torch.hann_window(8, **options),
    "new_zeros": lambda device: torch.empty(1, device=device).new_zeros(2),
    "new_tensor": lambda device: torch.empty(1, device=device).new_tensor([1.0]),
    "zeros_like": lambda device: torch.zeros_like(torch.empty(2, device=device)),
    "complex": lambda device: torch.complex(
        torch.ones(2, device=device), torch.ones(2, device=device)
    ),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_values(name):
    actual, expected = FACTORIES[name](device="foo:1"), FACTORIES[name](device="cpu")
    assert actual.device == torch.device("foo:1")
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.cpu(), expected)


def test_device_without_index_is_the_current_one():
    with torch.foo.device(1):
        assert torch.tril_indices(2, 2, device="foo").device.index == 1
        assert torch.zeros(2, device="foo").device.index == 1
    with torch.device("foo:1"):
        assert torch.zeros(2).device == torch.device("foo:1")


def test_default_device():
    torch.set_default_device("foo:1")
    try:
        assert torch.nn.Linear(2, 2).weight.device == torch.device("foo:1")
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(2, device="foo", pin_memory=True),
        lambda: torch.empty_strided((2,), (1,), device="foo", pin_memory=True),
        lambda: torch.zeros(2, device="foo", pin_memory=True),
        lambda: torch.ops.aten.tril_indices(2, 2, device="foo", pin_memory=True),
    ],
)
def test_pinned_foo_memory_is_refused(call):
    with pytest.raises(RuntimeError, match=r"^Only dense CPU tensors can be pinned"):
        call()


def test_deterministic_mode_fills_new_memory():
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(100, device="foo").isnan().all()
        assert (torch.empty(100, dtype=torch.int64, device="foo") == 2**63 - 1).all()
        assert torch.empty_strided((2, 3), (3, 1), device="foo").isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_negative_sizes_are_refused():
    with pytest.raises(RuntimeError, match="Trying to create tensor with negative dimension -1"):
        torch.empty(-1, device="foo")
