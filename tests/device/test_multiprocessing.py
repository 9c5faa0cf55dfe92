"""A tensor of foo that one process sends to another is the same memory in both."""

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from support.processes import python

PROGRAM = """
import sys
import torch
import torch.multiprocessing as multiprocessing

def child(requests, answers):
    tensor, weight, view, empty = requests.get()
    assert tensor.device == view.device == empty.device == torch.device("foo:1")
    assert tensor.is_shared() and tensor.sum().item() == 1000
    assert type(weight) is torch.nn.Parameter and weight.requires_grad
    assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    assert (view.storage_offset(), empty.shape) == (2, (0, 3))
    tensor.add_(1)
    with torch.no_grad():
        weight.mul_(3)
    answers.put(torch.arange(3.0, device="foo"))
    requests.get()

if __name__ == "__main__":
    method, strategy = sys.argv[1:]
    multiprocessing.set_sharing_strategy(strategy)
    context = multiprocessing.get_context(method)
    requests, answers = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(requests, answers))
    process.start()
    tensor = torch.ones(1000, device="foo:1")
    weight = torch.nn.Parameter(torch.ones(3, device="foo"))
    requests.put((tensor, weight, tensor[2:], torch.ones(0, 3, device="foo:1")))
    assert answers.get().tolist() == [0, 1, 2]
    requests.put(None)
    process.join()
    assert process.exitcode == 0
    assert tensor.tolist() == [2] * 1000 and weight.tolist() == [3] * 3
"""


@pytest.mark.parametrize(
    ("method", "strategy"), [("spawn", "file_descriptor"), ("fork", "file_system")]
)
def test_queue(tmp_path, method, strategy):
    # A spawned child imports its parent's file.
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    process = python(path, method, strategy)
    assert process.returncode == 0, process.stderr


def sent(value):
    """Return the value as another process would receive it."""
    return pickle.loads(ForkingPickler.dumps(value))


def test_the_same_tensor_comes_back():
    tensor = torch.arange(6.0, device="foo:1")
    for view in (tensor, tensor[1:], tensor.view(2, 3).t()):
        back = sent(view)
        assert back.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        assert (back.shape, back.stride()) == (view.shape, view.stride())
        assert torch.equal(back, view)
    back.zero_()
    assert tensor.tolist() == [0] * 6


def test_figures():
    held = torch.foo.memory_allocated(1)
    tensor = torch.ones(1000, device="foo:1")
    back = sent(tensor)
    # Both tensors share one storage; shared memory is not rounded up.
    assert torch.foo.memory_allocated(1) == held + 4000
    del tensor
    assert back.sum().item() == 1000
    del back
    assert torch.foo.memory_allocated(1) == held


def test_a_storage_that_has_grown_is_shared_anew():
    tensor = torch.ones(10, device="foo")
    former = sent(tensor).data_ptr()
    tensor.resize_(5000).fill_(2)
    assert tensor.data_ptr() != former
    assert torch.equal(sent(tensor), tensor)
    other = sent(torch.ones(10, device="foo"))
    assert other.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    assert other.tolist() == [1] * 10


def test_the_memory_of_a_storage_that_grew_on_the_other_side():
    tensor = torch.ones(10, device="foo:1")
    message = ForkingPickler.dumps(tensor)
    tensor.resize_(5000).fill_(2)
    # The message still refers to the first memory.
    back = pickle.loads(message)
    assert back.tolist() == [1] * 10


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.ones(2, 0),
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tensor.layout}",
)
def test_kinds_of_tensors(tensor):
    back = sent(tensor.foo())
    assert back.device == torch.device("foo:0")
    assert (back.dtype, back.layout) == (tensor.dtype, tensor.layout)
    assert torch.equal(back.cpu().to_dense(), tensor.to_dense())


def test_tensors_of_the_cpu_are_sent_as_before():
    tensor = torch.ones(3)
    back = sent(tensor)
    assert back.device.type == "cpu"
    back.add_(1)
    assert tensor.tolist() == [2] * 3
