"""Device foo exists right after either import, in any order."""

import pytest
from support.parts import whole
from support.processes import python

CHECK = "assert (torch.ones(2, device='foo') + 1).tolist() == [2, 2]\n"


def run(program, **options):
    process = python(program, **options)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize(
    "imports",
    [
        "import torch",
        "import foo_ops; import torch",
        "import torch; import foo_ops",
        *whole(
            "import foo_ops.device; import torch",
            "import torch.nn; import foo_ops; foo_ops.autoload(); foo_ops.autoload()",
            "import torch._dynamo; import torch",
            "import torch.distributed.fsdp",
        ),
    ],
)
def test_import_orders(imports):
    # A fork has imported torch already, so imports before torch, and those at its end, need a new
    # interpreter.
    run(
        f"{imports}\n{CHECK}", new=imports == "import torch" or imports.startswith("import foo_ops")
    )


def test_without_autoload():
    program = f"""
import torch
assert not hasattr(torch, "foo")
import foo_ops
{CHECK}
"""
    run(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_module_is_torch_foo():
    run("import torch.foo, foo_ops.device\nassert torch.foo is foo_ops.device")


def test_forked_child_cannot_use_a_device_that_its_parent_used():
    program = """
import os, torch
from multiprocessing.reduction import ForkingPickler
tensor = torch.ones(1000, device="foo")
event, stream = torch.foo.Event(), torch.foo.current_stream()
pinned = torch.ones(3).pin_memory()
child = os.fork()
if child == 0:
    assert torch.foo._is_in_bad_fork() and not torch.foo.is_initialized()
    message = (
        "Cannot re-initialize foo in forked subprocess. To use foo with multiprocessing, you must"
        " use the 'spawn' start method"
    )
    for use in (
        lambda: torch.ones(1, device="foo"),
        lambda: tensor + 1,
        lambda: tensor.cpu(),
        lambda: torch.foo.set_device(0),
        torch.foo.init,
        torch.foo.current_device,
        torch.foo.synchronize,
        torch.foo.Stream,
        torch.foo.current_stream,
        torch.foo.default_stream,
        lambda: event.record(stream),
        torch.foo.get_rng_state,
        torch.foo.get_rng_state_all,
        torch.foo.initial_seed,
        torch.foo.get_device_properties,
        torch.foo.get_device_capability,
        lambda: torch.foo.can_device_access_peer(0, 1),
        torch.foo.ipc_collect,
        torch.ones(3).pin_memory,
        lambda: torch.empty(3, pin_memory=True),
        lambda: ForkingPickler.dumps(tensor),
    ):
        try:
            use()
        except RuntimeError as error:
            assert str(error).splitlines()[0] == message, error
        else:
            raise AssertionError(f"no error of {use}")
    # A program that makes no use of the device goes on.
    torch.manual_seed(0)
    assert torch.rand(3).sum() > 0
    leaf = torch.ones(3, requires_grad=True)
    leaf.square().sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]
    assert torch.foo.is_available() and torch.foo.memory_allocated() == 0
    assert not torch.foo.memory_stats() and not torch.foo.host_memory_stats()
    torch.foo.empty_cache()
    assert pinned.tolist() == [1, 1, 1] and not pinned.is_pinned()
    del tensor, pinned
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert tensor.sum().item() == 1000
"""
    run(program)


def test_forked_child_can_use_a_device_that_its_parent_did_not():
    program = """
import os, torch
assert not torch.foo.is_initialized()
child = os.fork()
if child == 0:
    assert torch.ones(3, device="foo").sum().item() == 3
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    run(program)


def test_initialization():
    program = """
import torch
assert torch.foo.is_available() and torch.foo.device_count() == 2
assert not torch.foo.is_initialized() and not torch.foo._initialized
assert torch.foo.memory_allocated() == 0
assert not torch.foo.memory_stats() and not torch.foo.host_memory_stats()
torch.foo.init()
assert torch.foo.is_initialized() and torch.foo._initialized
"""
    run(program)


def test_spawned_child_can_use_a_device_that_its_parent_used(tmp_path):
    program = """
import torch
import torch.multiprocessing

def child(index, value):
    assert torch.full((3,), value, device="foo").sum().item() == 6

if __name__ == "__main__":
    torch.ones(1, device="foo")
    torch.multiprocessing.spawn(child, (2.0,), nprocs=1)
    print("done")
"""
    # The child imports its parent's file.
    path = tmp_path / "spawn.py"
    path.write_text(program)
    assert run(path) == "done\n"
