"""Forked children use the CPU's operators, whatever their parent's threads were doing."""

import pytest
from support.parts import whole
from support.processes import AT_MOMENT, run

# ``in_child(function)`` runs a function in a forked child, which must end in time.
FORKS = (
    AT_MOMENT
    + """
import os, signal, sys, threading, time, traceback
import torch

def in_child(function):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "the child failed, or hung"

# The compiler stops at a moment of its work, until it is let go on. It goes on after some time
# also when a fork waits for it.
stopped = threading.Event()

def stop_at(moment):
    at(moment, lambda: (stopped.set(), time.sleep(0.5)))

def use():
    query = torch.ones(1, 2, 5, 8)
    assert torch.equal(torch.ops.foo.abs(-query), query)
    assert torch.allclose(torch.ops.foo.attention(query, query, query)[0], query)
    x = torch.tensor([-1.0, 2.0], dtype=torch.bfloat16)
    assert torch.ops.foo.abs(x).tolist() == [1, 2]

torch.set_num_threads(1)
"""
)


@pytest.mark.parametrize("moment", ["_emit", *whole("_key", "link")])
def test_fork_while_another_thread_compiles(tmp_path, moment):
    program = f"""{FORKS}
stop_at({moment!r})
thread = threading.Thread(target=torch.ops.foo.abs, args=[torch.ones(3)])
thread.start()
stopped.wait()
in_child(use)
thread.join()
use()
print("right")
"""
    assert run(program, tmp_path) == ("right", "")


def test_fork_by_a_signal_handler_during_a_compile(tmp_path):
    program = f"""{FORKS}
signal.signal(signal.SIGUSR1, lambda number, frame: in_child(use))
stop_at("_emit")

def interrupt():
    stopped.wait()
    signal.raise_signal(signal.SIGUSR1)

threading.Thread(target=interrupt).start()
torch.ops.foo.abs(torch.ones(3))
print("right")
"""
    assert run(program, tmp_path) == ("right", "")


def test_fork_while_numba_compiles_for_somebody_else(tmp_path):
    program = f"""{FORKS}
from numba.core.compiler_lock import global_compiler_lock

def compile_slowly():
    with global_compiler_lock:
        stopped.set()
        time.sleep(0.5)

threading.Thread(target=compile_slowly).start()
stopped.wait()
in_child(use)
print("right")
"""
    assert run(program, tmp_path) == ("right", "")


@pytest.mark.whole
def test_workers_of_a_data_loader_while_threads_compile(tmp_path):
    program = f"""{FORKS}
class Attended(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        query = torch.full((1, 2, 5, 8), float(index), dtype=torch.float64)
        return torch.ops.foo.attention(query, query, query)[0]

DTYPES = (torch.float16, torch.float32, torch.bfloat16)

def compile_many():
    for dtype in DTYPES:
        query = torch.ones(1, 2, 5, 8, dtype=dtype, requires_grad=True)
        torch.ops.foo.attention(query, query, query)[0].sum().backward()

threads = [threading.Thread(target=compile_many) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(3):
    loader = torch.utils.data.DataLoader(Attended(), batch_size=2, num_workers=2, timeout=120)
    assert [batch.flatten()[0].item() for batch in loader] == [0, 2, 4, 6]
for thread in threads:
    thread.join()
print("right")
"""
    assert run(program, tmp_path)[0] == "right"


# Threads that take the extension's locks as often as they can. The last one uses the device.
BUSY = {
    "layouts of results": "torch.ops.foo.rms_norm(torch.ones(2, 8), torch.ones(8))",
    "pinned memory": "torch.ones(3).is_pinned('foo')",
    "operator counts": "torch.foo.operator_counts()",
    "device memory": "torch.empty(3, device='foo'); torch.foo.memory_snapshot()",
}


@pytest.mark.parametrize("lock", BUSY)
def test_fork_while_other_threads_hold_locks(tmp_path, lock):
    in_child = BUSY[lock].rpartition(";")[2].strip()
    program = f"""{FORKS}
sys.setswitchinterval(1e-5)
{BUSY[lock]}
done = threading.Event()

def work():
    while not done.is_set():
        {BUSY[lock]}

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
try:
    for _ in range(30):
        in_child(lambda: {in_child})
finally:
    done.set()
print("right")
"""
    assert run(program, tmp_path)[0] == "right"


def test_child_of_a_process_that_used_the_device(tmp_path):
    """The child gets an error and never hangs, even when the parent's tensors are freed."""
    program = f"""{FORKS}
from foo_ops import ops
tensor = torch.ones(1000, device="foo")
pinned = torch.ones(3).pin_memory()
generator = torch.Generator("foo")
adopted = torch.ones(3).sort()[0].to("foo")

def child():
    global tensor, pinned, adopted
    for use_device in (
        lambda: tensor.add_(1),
        lambda: tensor.normal_(),
        lambda: tensor.random_(),
        lambda: torch.ops.foo.abs(tensor),
        lambda: torch.ops.foo.abs_(tensor),
        lambda: tensor.copy_(torch.ones(1000)),
        lambda: torch.ones(1000).copy_(tensor),
        lambda: tensor.sum().item(),
        lambda: torch.ones(3).to("foo"),
        lambda: torch.foo.manual_seed(3) or torch.foo.get_rng_state(),
    ):
        try:
            use_device()
        except RuntimeError as error:
            assert "Cannot re-initialize foo in forked subprocess" in str(error), error
        else:
            raise AssertionError("no error")
    del tensor, pinned, adopted
    use()

done = threading.Event()

def work():
    while not done.is_set():
        torch.ones(3, device="foo").add_(1)
        torch.ones(3).pin_memory()

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
try:
    for _ in range(5):
        in_child(child)
finally:
    done.set()
print("right")
"""
    assert run(program, tmp_path)[0] == "right"
