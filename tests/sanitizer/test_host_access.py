"""Memory of the device is for kernels: any other access ends the process, with a finding."""

import ctypes
import faulthandler
import re
import signal

import numpy as np
import pytest
import torch
from support import host_accesses
from support.processes import python

from foo_ops import sanitizer

PROGRAMS = [pytest.param(each, id=each.__name__) for each in host_accesses.PROGRAMS]


@pytest.mark.parametrize("program", PROGRAMS)
def test_wrong(program):
    name = program.__name__
    process = python(
        f"from support import host_accesses\nhost_accesses.{name}(right=False)\nprint('not found')",
        FOO_SANITIZER="1",
    )
    assert process.returncode == -signal.SIGSEGV
    assert process.stdout == ""
    first, *rest = process.stderr.splitlines()
    assert first.startswith("foo_ops.sanitizer: host access: ")
    deed = "written" if "write" in name else "read"
    assert rest[0] == f"now: {deed} by code outside of operators on the host"
    assert any(name in line or "threading.py" in line for line in rest)
    assert process.stderr.count("foo_ops.sanitizer: ") == 1


@pytest.mark.parametrize("program", PROGRAMS)
def test_right(program):
    with sanitizer.check() as findings:
        for _ in range(5):
            program(right=True)
    assert findings == []


def test_every_run_ends():
    ends = [
        python("from support import host_accesses as h\nh.c_reads(right=False)", FOO_SANITIZER="1")
        for _ in range(3)
    ]
    assert {end.returncode for end in ends} == {-signal.SIGSEGV}


def test_text():
    process = python(
        """
import ctypes
import torch
from foo_ops import sanitizer
with sanitizer.check():
    x = torch.full((2, 3), 1.5, device="foo")
    print(hex(x.data_ptr()), flush=True)
    ctypes.string_at(x.data_ptr(), 4)
"""
    )
    address = process.stdout.strip()
    assert process.stderr.splitlines() == [
        "foo_ops.sanitizer: host access: tensor of shape (2, 3) and torch.float32 on foo:0, 24 "
        f"bytes at {address}",
        "now: read by code outside of operators on the host",
        '  File "<string>", line 8, in <module>',
        "before: written by aten::fill_ on the default stream",
        '  File "<string>", line 6, in <module>',
        "To fix this: copy the tensor to the CPU first with tensor.cpu(); only kernels may use its "
        "data_ptr().",
    ]


def test_memory_is_open_again_after_check():
    with sanitizer.check():
        x = torch.ones(4, device="foo")
    values = (ctypes.c_float * 4).from_address(x.data_ptr())
    assert list(values) == [1, 1, 1, 1]
    values[0] = 5
    assert x.tolist() == [5, 1, 1, 1]


def test_memory_that_is_older_than_the_sanitizer():
    process = python(
        """
import ctypes
import torch
from foo_ops import sanitizer
x = torch.ones(5, device="foo")
sanitizer.enable()
ctypes.memset(x.data_ptr(), 0, 4)
"""
    )
    assert process.returncode == -signal.SIGSEGV
    assert re.search(
        r"host access: memory at 0x[0-9a-f]+ on foo:0\nnow: written by", process.stderr
    )


def test_kernels_in_python_may():
    def fill(x):
        np.ctypeslib.as_array(host_accesses.address_of(x), (x.numel(),))[:] = 3

    with (
        torch.library._scoped_library("host_access_of_a_kernel", "DEF") as kernels,
        sanitizer.check(),
    ):
        kernels.define("fill(Tensor(a!) x) -> ()")
        kernels.impl("fill", fill, "PrivateUse1")
        x = torch.zeros(5, device="foo")
        torch.ops.host_access_of_a_kernel.fill(x)
        assert x.tolist() == [3] * 5


def test_memory_that_is_copied_on_writing():
    with sanitizer.check() as findings:
        x = torch.ones(5, device="foo")
        y = torch._lazy_clone(x)
        y.data_ptr()
        y += 1
        assert (x.tolist(), y.tolist()) == ([1] * 5, [2] * 5)
    assert findings == []


def test_what_kernels_of_the_cpu_keep_is_theirs():
    kept = []

    def keep(x):
        kept.append(torch.full((600, 600), 2.0))
        return x.clone()

    with (
        torch.library._scoped_library("host_access_of_a_table", "DEF") as kernels,
        sanitizer.check(),
    ):
        kernels.define("keep(Tensor x) -> Tensor")
        kernels.impl("keep", keep, "CPU")
        torch.ops.host_access_of_a_table.keep(torch.ones(5, device="foo"))
        assert kept[0].numpy().sum() == 720_000
        kept[0] += 1


def test_arguments_that_kernels_of_the_cpu_keep_are_theirs():
    kept = []
    with torch.library._scoped_library("host_access_of_an_argument", "DEF") as kernels:
        kernels.define("keep(Tensor x) -> ()")
        kernels.impl("keep", kept.append, "CPU")
        x = torch.ones(5, device="foo")
        with sanitizer.check() as findings:
            torch.ops.host_access_of_an_argument.keep(x)
            kept[0].numpy()[:] = 7
            assert x.tolist() == [7] * 5
        # Also for memory from before the check.
        with sanitizer.check():
            assert kept.pop().numpy().sum() == 35
    assert findings == []


def test_a_recurrent_network_and_its_gradients():
    # With batch_first, its kernels keep a copy for the backward pass.
    layer = torch.nn.GRU(4, 5, bias=False, batch_first=True, device="foo:1")
    x = torch.randn(6, 3, 4, device="foo:1", requires_grad=True)
    with sanitizer.check() as findings:
        layer(x)[0].sum().backward()
        assert torch.isfinite(x.grad).all()
    assert findings == []


def test_storage_that_grows():
    with sanitizer.check() as findings:
        x = torch.arange(4, dtype=torch.uint8, device="foo")
        x.untyped_storage().resize_(1000)
        assert x.tolist() == [0, 1, 2, 3]
    assert findings == []


FAULTS = """
import ctypes, faulthandler, torch
from foo_ops import sanitizer
{first}
{second}
x = torch.ones(1000, device="foo") + 1
assert x.sum().item() == 2000
print("here", flush=True)
ctypes.string_at(8)
"""


@pytest.mark.parametrize("order", [("faulthandler", "sanitizer"), ("sanitizer", "faulthandler")])
def test_other_faults_are_left_to_others(order):
    first, second = (f"{name}.enable()" for name in order)
    process = python(FAULTS.format(first=first, second=second))
    assert (process.returncode, process.stdout) == (-signal.SIGSEGV, "here\n")
    assert process.stderr.count("Fatal Python error: Segmentation fault") == 1
    assert "foo_ops.sanitizer" not in process.stderr


def test_other_faults_without_another_handler():
    process = python(FAULTS.format(first="sanitizer.enable()", second=""))
    assert (process.returncode, process.stderr) == (-signal.SIGSEGV, "")


def test_findings_beside_the_small_stack_of_faulthandler():
    process = python(
        """
import faulthandler, torch
from foo_ops import sanitizer
faulthandler.enable()
with sanitizer.check() as findings:
    torch.ones(4, device="foo").to("cpu", non_blocking=True).numpy().sum()
print([finding.kind for finding in findings])
"""
    )
    assert process.stdout == "['unsynchronized host read']\n", process.stderr


def test_the_system_may_use_pinned_memory_after_a_wait(tmp_path):
    with sanitizer.check() as findings, (tmp_path / "file").open("wb", buffering=0) as file:
        host = torch.ones(5, device="foo").to("cpu", non_blocking=True)
        torch.foo.synchronize()
        file.write(host.numpy())
    assert findings == []
    assert np.fromfile(tmp_path / "file", dtype=np.float32).tolist() == [1] * 5


def test_one_finding_for_a_copy():
    with sanitizer.check() as findings:
        host = torch.ones(5, device="foo").to("cpu", non_blocking=True)
        host.numpy().sum()
        host.sum()
        host.tolist()
    assert [finding.kind for finding in findings] == ["unsynchronized host read"]


def test_other_handlers_are_back_after_check():
    was_enabled = faulthandler.is_enabled()
    process = python(
        """
import faulthandler, os, signal, torch
from foo_ops import sanitizer
faulthandler.enable()
with sanitizer.check():
    torch.ones(4, device="foo") + 1
os.kill(os.getpid(), signal.SIGSEGV)
"""
    )
    assert "Fatal Python error: Segmentation fault" in process.stderr
    assert faulthandler.is_enabled() == was_enabled


def test_what_a_finding_runs_may_use_the_device():
    process = python(
        """
import gc, warnings, torch
from support import host_streams
from foo_ops import sanitizer

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("garbage", x.sum().item(), flush=True)

def show(message, *rest):
    Garbage()
    gc.collect()
    print("shown", x.sum().item(), flush=True)

x = torch.ones(2, device="foo")
warnings.showwarning = show
sanitizer.enable(action="warn")
host_streams.numpy_writes_during_a_copy(torch.foo.Stream(), torch.foo.Stream(), right=False)
host = torch.ones(5, device="foo").to("cpu", non_blocking=True)
print(host.numpy().sum())
"""
    )
    shown = ["garbage 2.0", "shown 2.0"]
    assert (process.returncode, process.stdout.splitlines()) == (0, [*shown, *shown, "5.0"])
