"""Attention calls keep memory for the next call: it is limited, and never shared."""

import os

from support.processes import python

RESIDENT = """
import os
import threading
import torch

def resident():
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def step(*shape):
    query, key, value = torch.randn(3, *shape).unbind()
    query.requires_grad_()
    output = torch.ops.foo.attention(query, key, value)[0]
    torch.autograd.grad(output, query, torch.ones_like(output))

def in_threads(count, function, *arguments):
    threads = [threading.Thread(target=function, args=arguments) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def grown(program):
    """Run a program that prints by how many bytes it has grown, and return that number.

    Memory of its results does not wait for others.
    """
    process = python(RESIDENT + program, FOO_RESULT_MEMORY="0")
    assert process.returncode == 0, process.stderr
    return int(process.stdout)


LARGE_HEADS = """
step(1, 2, 200, 64)
before = resident()
step(1, 2, 200, 4096)
for _ in range(100):
    step(1, 1, 20, 64)
print(resident() - before)
"""


def test_memory_of_large_heads_is_given_up():
    """When small heads follow, 40 MB and more per thread are freed."""
    assert grown(LARGE_HEADS) < 2**24


SHORT_LIVED = """
def rounds():
    for _ in range(40):
        in_threads(4, step, 1, 2, 200, 512)
    return resident()

# Each round would leave behind what a thread does; memory that the C library keeps comes and goes.
sizes = [rounds() for _ in range(4)]
print(min(after - before for before, after in zip(sizes, sizes[1:])))
"""


def test_threads_that_end_leave_nothing_behind():
    assert grown(SHORT_LIVED) < 2**24


MANY_AT_ONCE = """
torch.set_num_threads(1)
barrier = threading.Barrier(24)

def together():
    barrier.wait()
    for _ in range(3):
        step(1, 1, 64, 2048)

step(1, 1, 64, 2048)
before = resident()
in_threads(24, together)
print(resident() - before)
"""


def test_what_is_kept_of_many_calls_at_once_has_a_limit():
    """Each call needs 20 MB; 64 MB are kept, and 4 MB per processor."""
    assert grown(MANY_AT_ONCE) < 2**26 + 2**22 * os.cpu_count() + 2**25


WRONG_RESULTS = """
torch.set_num_threads(1)
wrong = []

def compare(query, output, gradient):
    for _ in range(40):
        own = query.clone().requires_grad_()
        again = torch.ops.foo.attention(own, own, own, is_causal=True)[0]
        again.sum().backward()
        if not (torch.equal(output, again) and torch.equal(gradient, own.grad)):
            wrong.append(1)

threads = []
for length in (5, 40, 130, 300):
    query = torch.randn(1, 2, length, 8 + length % 50, requires_grad=True)
    output = torch.ops.foo.attention(query, query, query, is_causal=True)[0]
    output.sum().backward()
    arguments = (query.detach(), output.detach(), query.grad)
    threads += [threading.Thread(target=compare, args=arguments) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(wrong))
"""


def test_calls_at_once_do_not_share_memory():
    assert grown(WRONG_RESULTS) == 0


FORKED = """
torch.set_num_threads(1)
step(1, 1, 300, 64)
query = torch.randn(1, 1, 300, 64)
output = torch.ops.foo.attention(query, query, query)[0]
child = os.fork()
if child == 0:
    os._exit(not torch.equal(torch.ops.foo.attention(query, query, query)[0], output))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_can_use_what_is_kept():
    assert grown(FORKED) == 0
