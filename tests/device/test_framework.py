"""torch's own device-generic test framework runs on foo."""

# ruff: noqa: PT009, PT027 (its assertions are a part of the framework)

import torch
from torch.testing._internal.common_device_type import (
    deviceCountAtLeast,
    dtypes,
    instantiate_device_type_tests,
    ops,
    precisionOverride,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase


class TestGeneric(TestCase):
    def test_device(self, device):
        tensor = torch.ones(3, device=device)
        self.assertEqual(tensor.device, torch.device(device))
        self.assertEqual(tensor * 2, torch.full((3,), 2.0, device=device))

    def test_differences_are_found(self, device):
        with self.assertRaisesRegex(AssertionError, "Tensor-likes are not close"):
            self.assertEqual(torch.ones(3, device=device), torch.zeros(3, device=device))

    @dtypes(torch.float32, torch.int64)
    def test_dtypes(self, device, dtype):
        self.assertEqual(torch.zeros(2, device=device, dtype=dtype).dtype, dtype)

    @deviceCountAtLeast(2)
    def test_devices(self, devices):
        first, second = devices[:2]
        self.assertNotEqual(first, second)
        self.assertEqual(torch.ones(2, device=first).to(second).device, torch.device(second))

    @precisionOverride({torch.float32: 1e-3})
    @dtypes(torch.float32)
    def test_precision(self, device, dtype):
        self.assertEqual(torch.ones(1, device=device), torch.ones(1, device=device) + 5e-4)

    @ops([op for op in op_db if op.name in ("add", "linalg.qr")], allowed_dtypes=[torch.float64])
    def test_operators(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            result = op(sample.input, *sample.args, **sample.kwargs)
            cpu = sample.transform(lambda value: value.cpu() if torch.is_tensor(value) else value)
            self.assertEqual(result, op(cpu.input, *cpu.args, **cpu.kwargs), exact_device=False)


instantiate_device_type_tests(TestGeneric, globals(), only_for="privateuse1")


def test_all_were_made_for_foo():
    made = globals()["TestGenericPRIVATEUSE1"]
    names = [name for name in dir(made) if name.startswith("test_") and "_foo" in name]
    assert sorted(names) == [
        "test_device_foo",
        "test_devices_foo",
        "test_differences_are_found_foo",
        "test_dtypes_foo_float32",
        "test_dtypes_foo_int64",
        "test_operators_add_foo_float64",
        "test_operators_linalg_qr_foo_float64",
        "test_precision_foo_float32",
    ]
