"""Registers device ``foo`` with torch: its name, its module, its generated methods."""

import atexit
import types

import torch

from foo_ops import _C
from foo_ops._after_import import after_import
from foo_ops.device import _data_parallel, _dlpack, _module_method, _profiler, _sharing

# Typed storages count whole elements, so there are none for dtypes below a byte.
SMALLER_THAN_A_BYTE = [torch.quint4x2, torch.quint2x4]


def register(module: types.ModuleType) -> None:
    torch.utils.rename_privateuse1_backend("foo")
    torch.utils.generate_methods_for_privateuse1_backend(
        for_module=False, for_storage=True, unsupported_dtype=SMALLER_THAN_A_BYTE
    )
    _module_method.install()
    torch._register_device_module("foo", module)
    _dlpack.register()
    _sharing.register()
    _data_parallel.register()
    _profiler.register()
    # At shutdown Python ends threads that request the GIL, and C++ aborts the process if that
    # happens in a destructor: with a backward pass just before the end that happened 1 time in 14.
    atexit.register(_C.device.wait_for_autograd_threads)
    # A build of torch may lack the first. torch imports the others at the first use of
    # torch.compile, which takes seconds. None has an entry point for devices to register earlier.
    after_import("torch.distributed.distributed_c10d", _register_with_distributed)
    after_import("torch._subclasses.fake_impls", _register_with_fake_tensors)
    after_import("torch._dynamo", _register_with_dynamo)
    after_import("torch._inductor.compile_fx", _register_with_inductor)


def _register_with_distributed() -> None:
    from foo_ops.device import _distributed

    _distributed.register()


def _register_with_fake_tensors() -> None:
    from foo_ops.device import _fake

    _fake.register()


def _register_with_dynamo() -> None:
    from foo_ops.device import _dynamo

    _dynamo.register()


def _register_with_inductor() -> None:
    from foo_ops.device import _inductor

    _inductor.register()
