"""Signals and exceptions during compilation reach the caller unchanged."""

import pytest
from support.parts import whole
from support.processes import AT_MOMENT, run

MOMENTS = f"""{AT_MOMENT}
import os, signal, sys, threading, time
import torch
from foo_ops import library

# A process that was started in the background ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0.1)

x = torch.tensor([-1.5, 2.0])
"""


@pytest.mark.parametrize("moment", ["_key", "compile_kernel", "_emit", "link"])
def test_interrupt_during_a_compile(tmp_path, moment):
    program = f"""{MOMENTS}
at({moment!r}, lambda: send(signal.SIGINT))
try:
    torch.ops.foo.abs(x)
except BaseException as error:
    print(repr(error))
print(torch.ops.foo.abs(x).tolist())
"""
    assert run(program, tmp_path) == ("KeyboardInterrupt()\n[1.5, 2.0]", "")


@pytest.mark.parametrize("error", ["SystemExit(3)", "KeyboardInterrupt('why')", "TimeoutError(5)"])
def test_exception_of_a_signal_handler(tmp_path, error):
    program = f"""{MOMENTS}
def handler(number, frame):
    raise {error}

signal.signal(signal.SIGALRM, handler)
at("compile_kernel", lambda: send(signal.SIGALRM))
try:
    torch.ops.foo.abs(x)
except BaseException as error:
    print(repr(error))
print(torch.ops.foo.abs(x).tolist())
"""
    assert run(program, tmp_path) == (f"{error}\n[1.5, 2.0]", "")


def test_interrupts_at_any_moment(tmp_path):
    """Each interrupt ends the call, and the kernel is compiled nevertheless."""
    program = f"""{MOMENTS}
for attempt in range(24):
    timer = threading.Timer(attempt * 0.03, signal.raise_signal, [signal.SIGINT])
    timer.daemon = True
    x = torch.ones(3, 8, dtype=(torch.float32, torch.bfloat16)[attempt % 2])
    operator = torch.ops.foo.silu_mul if attempt % 4 < 2 else torch.ops.foo.rms_norm
    try:
        timer.start()
        try:
            operator(x, x[0] if attempt % 4 >= 2 else x)
        finally:
            timer.cancel()
    except KeyboardInterrupt:
        pass
    time.sleep(0.01)
for dtype in (torch.float32, torch.bfloat16):
    x = torch.ones(3, 8, dtype=dtype)
    assert torch.allclose(torch.ops.foo.silu_mul(x, x).float(), torch.tensor(0.731), rtol=1e-2)
    assert torch.allclose(torch.ops.foo.rms_norm(x, x[0]), x)
print("right")
"""
    assert run(program, tmp_path)[0] == "right"


def test_memory_error_during_a_compile(tmp_path):
    program = f"""{MOMENTS}
def fail():
    raise MemoryError("too little")

at("compile_kernel", fail)
try:
    torch.ops.foo.abs(x)
except BaseException as error:
    print(repr(error))
print(torch.ops.foo.abs(x).tolist())
"""
    assert run(program, tmp_path) == ("MemoryError('too little')\n[1.5, 2.0]", "")


@pytest.mark.parametrize("same", [True, False])
def test_signal_handler_that_uses_a_kernel_during_a_compile(tmp_path, same):
    program = f"""{MOMENTS}
y = x if {same} else x.double()

def handler(number, frame):
    print(torch.ops.foo.abs(y).tolist())

signal.signal(signal.SIGUSR1, handler)
at("compile_kernel", lambda: send(signal.SIGUSR1))
print(torch.ops.foo.abs(x).tolist())
"""
    assert run(program, tmp_path) == ("[1.5, 2.0]\n[1.5, 2.0]", "")


@pytest.mark.parametrize("error", ["KeyboardInterrupt", *whole("MemoryError")])
@pytest.mark.parametrize("place", ["fake", "refuse", "backward", "kernel"])
def test_exceptions_of_users_functions_that_cpp_calls(tmp_path, place, error):
    """``kernel`` is called during compilation, and raises."""
    program = f"""
import torch
from foo_ops import library
import foo_ops

def fail(place):
    if place == {place!r}:
        raise {error}(place)

def fake(x):
    fail("fake")
    return torch.empty_like(x)

def refuse(x):
    fail("refuse")
    raise ValueError("f: x must be positive")

def f(x, output, rows):
    for row in rows:
        for i in range(x.shape[-1]):
            output[row, i] = x[row, i]

def backward(context, gradient):
    fail("backward")
    return gradient

def check(x, output):
    return {place != "refuse"}

library.define("foo_interrupts::f", "(Tensor x) -> Tensor")
library.register_fake("foo_interrupts::f", fake)
library.register_kernel(
    "foo_interrupts::f", ("cpu", "foo"), library.tile_kernel(f, check=check, refuse=refuse)
)
library.register_autograd("foo_interrupts::f", backward)
for device in ("cpu", "foo"):
    x = torch.ones(2, 3, device=device, requires_grad=True)
    if {place!r} == "kernel":
        from foo_ops.kernels.compiler import emit
        original, emit.compile_kernel = emit.compile_kernel, lambda build: fail("kernel")
    try:
        torch.ops.foo_interrupts.f(x).sum().backward()
    except BaseException as caught:
        print(type(caught).__name__, caught.args)
    else:
        print("nothing")
    if {place!r} == "kernel":
        emit.compile_kernel = original
        torch.ops.foo_interrupts.f(x)
        break
"""
    printed, _ = run(program, tmp_path)
    for line in printed.splitlines():
        assert line == f"{error} ('{place}',)"
