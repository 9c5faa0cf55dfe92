"""Results of fake kernels are cached per torch setting."""

import contextlib

import pytest
import torch

from foo_ops import library
from foo_ops.testing.checks.matrix import poisoned_memory

DEVICES = ("cpu", "foo")
answers = {
    "default dtype": lambda: torch.get_default_dtype(),
    "gradients": lambda: torch.float64 if torch.is_grad_enabled() else torch.float32,
    "inference": lambda: torch.float64 if torch.is_inference_mode_enabled() else torch.float32,
    "deterministic": lambda: (
        torch.float64 if torch.are_deterministic_algorithms_enabled() else torch.float32
    ),
    "autocast on cpu": lambda: autocast_dtype("cpu"),
    "autocast on foo": lambda: autocast_dtype("foo"),
}


def autocast_dtype(device):
    is_enabled = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_enabled else torch.float32


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module", autouse=True)
def lib():
    lib = library.Library("foo_remembered", "FRAGMENT")

    @library.tile_kernel
    def copy(input, output, rows):
        for row in rows:
            for i in range(input.shape[-1]):
                output.row(row)[i] = input.row(row)[i]

    for name, dtype in answers.items():
        name = name.replace(" ", "_")
        lib.define(f"{name}(Tensor input) -> Tensor")
        library.register_fake(
            f"foo_remembered::{name}",
            lambda input, dtype=dtype: torch.empty(input.shape, dtype=dtype(), device=input.device),
            lib=lib,
        )
        library.register_kernel(f"foo_remembered::{name}", DEVICES, copy, lib=lib)
    return lib


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("default dtype", lambda: default_dtype(torch.float64)),
        ("gradients", torch.no_grad),
        ("inference", torch.inference_mode),
        ("deterministic", poisoned_memory),
        ("autocast on cpu", lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
        ("autocast on cpu", lambda: torch.autocast("cpu", dtype=torch.float16)),
        ("autocast on foo", lambda: torch.autocast("foo", dtype=torch.bfloat16)),
    ],
)
def test_results_follow_what_is_set(name, setting, device):
    operator, dtype = getattr(torch.ops.foo_remembered, name.replace(" ", "_")), answers[name]
    input = torch.arange(6.0, device=device).view(2, 3)
    before = dtype()
    for _ in range(2):
        assert operator(input).dtype == before
        with setting():
            assert dtype() != before
            output = operator(input)
            assert output.dtype == dtype()
        assert output.tolist() == input.tolist()
