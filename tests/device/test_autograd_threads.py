"""The device threads of torch's autograd engine end with the process."""

import pytest
from support.parts import whole
from support.processes import python

# Without the wait, 1 pass in 8 still holds the context, as the threads share a core with the
# caller.
CONTEXTS = """
import contextvars
import os
import sys
import weakref

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import torch
from foo_ops import _C

class Anything:
    pass

variable = contextvars.ContextVar("variable")
leaf = torch.zeros(2, device=sys.argv[1], requires_grad=True)

def backward(value):
    variable.set(value)
    leaf.sum().backward()
    _C.device.wait_for_autograd_threads()

left = 0
for _ in range(1000):
    value = Anything()
    reference = weakref.ref(value)
    contextvars.copy_context().run(backward, value)
    del value
    left += reference() is not None
print(left)
"""


@pytest.mark.parametrize("device", ["foo:0", "foo:1"])
def test_waits_until_nothing_holds_the_context_of_a_caller(device):
    process = python(CONTEXTS, device)
    assert (process.stdout, process.stderr) == ("0\n", "")


ENDS = {
    "device untouched": "import torch",
    "no backward pass": "import torch; torch.ones(3, device='foo')",
    "a backward pass": """
import torch
torch.ones(3, device="foo", requires_grad=True).sum().backward()
""",
    "without gradients": """
import torch
torch.set_grad_enabled(False)
torch.ones(3, device="foo")
""",
    "in inference mode": """
import torch
mode = torch.inference_mode()
mode.__enter__()
torch.ones(3, device="foo")
""",
    "with a default device": """
import torch
torch.set_default_device("foo")
torch.ones(3, requires_grad=True).sum().backward()
""",
    "a forked child": """
import os, sys
import torch
torch.ones(3, device="foo", requires_grad=True).sum().backward()
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
""",
    "memory at its limit": """
import torch
torch.foo.set_per_process_memory_fraction(1e-9)
try:
    torch.ones(10**6, device="foo")
except torch.OutOfMemoryError:
    pass
""",
}


@pytest.mark.parametrize("end", [*[*ENDS][:2], *whole(*[*ENDS][2:])])
def test_a_process_ends_in_silence(end):
    # A new interpreter: a fork has less to tear down at exit, and misses the race.
    process = python(ENDS[end], new=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
