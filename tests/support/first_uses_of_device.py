"""Touches device foo for the first time in many ways, each in a fork that has not used it.

Prints which ways failed. After each of them, operators run on every kind of tensor: those without a
kernel of foo find the fallback of their kind.
"""

import io
import threading
import time
import warnings

import torch
from support.forked import failures, in_threads, succeeds
from torch._subclasses.fake_tensor import FakeTensorMode

MATRIX = torch.tensor([[0.0, 1.5], [-0.5, 0]])
FOO = torch.device("foo")
aten = torch.ops.aten


def is_cold():
    return not torch.foo.is_initialized()


# relu and the conversions have no kernel of foo for these kinds, and torch has no formula for them.
def dense(x):
    return x.cumsum(0).logical_not()


def sparse(x):
    return x.to_sparse().relu().to_dense()


def compressed(x):
    return x.to_sparse_csr().relu().to_dense()


def quantized(x):
    return torch.quantize_per_tensor(x, 0.5, 0, torch.qint8).relu().dequantize()


def nested(x):
    return torch.nested.as_nested_tensor([x, x[:1]]).relu().unbind()[0]


KINDS = (dense, sparse, compressed, quantized, nested)


def right(*kinds):
    for kind in kinds or KINDS:
        result = kind(MATRIX.to("foo"))
        assert result.device.type == "foo"
        assert torch.equal(result.cpu(), kind(MATRIX)), kind.__name__


def same(result, expected):
    assert result.device.type == "foo"
    assert torch.equal(result.cpu().to_dense(), expected.to_dense())


# The first ones call operators directly: Python functions would prepare the device before.
def indices_by_operator():
    same(aten.tril_indices.default(3, 3, device=FOO), torch.tril_indices(3, 3))


def sparse_by_operator():
    options = {"device": FOO, "layout": torch.sparse_coo}
    found = aten._sparse_coo_tensor_with_dims.default(1, 1, [2, 3], **options)
    same(found.relu(), torch.zeros(2, 3))


def empty_sparse_by_operator():
    found = aten.empty.memory_format([2, 3], device=FOO, layout=torch.sparse_coo)
    same(found.relu(), torch.zeros(2, 3))


def compressed_by_operator():
    found = aten.empty.memory_format([2, 3], device=FOO, layout=torch.sparse_csr)
    same(found.relu(), torch.zeros(2, 3))


def quantized_by_operator():
    options = {"device": FOO, "dtype": torch.quint8}
    found = aten._empty_affine_quantized.default([2], scale=0.5, zero_point=3, **options)
    assert found.fill_(2.0).relu().dequantize().tolist() == [2, 2]


def sparse_constructor():
    indices = torch.tensor([[0, 1], [1, 0]])
    found = torch.sparse_coo_tensor(indices, torch.tensor([1.5, -0.5]), (2, 2), device="foo")
    same(found.relu(), MATRIX.relu())


def compressed_constructor():
    pointers, indices = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    found = torch.sparse_csr_tensor(pointers, indices, torch.tensor([1.5, -0.5]), device="foo")
    same(found.relu(), MATRIX.relu())


def nested_constructor():
    found = torch.nested.nested_tensor([[1.0, 2.0], [-3.0]], device="foo")
    assert found.relu().unbind()[1].tolist() == [0]


def moved():
    same(MATRIX.to("foo").cumsum(0), MATRIX.cumsum(0))


def moved_sparse():
    same(MATRIX.to_sparse().to("foo").relu(), MATRIX.relu())


def moved_module():
    module = torch.nn.Linear(2, 2)
    expected = module.weight.detach().clone()
    same(module.to("foo").weight.detach(), expected)


def loaded():
    same(load(MATRIX).cumsum(0), MATRIX.cumsum(0))


def loaded_sparse():
    same(load(MATRIX.to_sparse()).relu(), MATRIX.relu())


def loaded_compressed():
    same(load(MATRIX.to_sparse_csr()).relu(), MATRIX.relu())


def loaded_quantized():
    saved = torch.quantize_per_tensor(MATRIX, 0.5, 0, torch.qint8)
    same(load(saved).relu().dequantize(), saved.relu().dequantize())


def load(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, map_location="foo")


def storage():
    memory = torch.UntypedStorage(8, device="foo")
    assert memory.fill_(0).device.type == "foo"


def allocator():
    torch.foo.caching_allocator_delete(torch.foo.caching_allocator_alloc(64))


def from_dlpack():
    found = torch.from_dlpack(torch.arange(3.0).to("foo"))
    same(found.cumsum(0), torch.tensor([0.0, 1, 3]))


def device_by_name():
    with torch.device("foo"):
        found = torch.eye(2).to_sparse().relu()
    same(found, torch.eye(2))


def current_device():
    torch.foo.set_device(1)
    with torch.foo.device(0):
        assert torch.foo.current_device() == 0


def stream():
    with torch.foo.stream(torch.foo.Stream()):
        right()


def event():
    torch.Event("foo").record()


def generator():
    same(torch.rand(2, generator=torch.Generator("foo"), device="foo") < 2, torch.ones(2).bool())


def pinned():
    assert MATRIX.pin_memory().is_pinned()


def synchronized():
    torch.accelerator.synchronize()


def gradients():
    x = MATRIX.clone().requires_grad_()
    sparse(x.to("foo")).sum().backward()
    assert x.grad.tolist() == [[0, 1], [0, 0]]


def autocast():
    with torch.autocast("foo", torch.bfloat16):
        assert (MATRIX.to("foo") @ MATRIX.to("foo")).dtype == torch.bfloat16
        assert MATRIX.to("foo").to_sparse().relu().dtype == torch.float32


def fakes():
    with FakeTensorMode(), torch.autocast("foo", torch.bfloat16):
        x = torch.empty(2, 2, device="foo:0")
        assert (x @ x).dtype == torch.bfloat16
        assert x.cumsum(0).add(1).device.type == "foo"
        assert x.to_sparse().layout == torch.sparse_coo


def compiled():
    function = torch.compile(lambda x: x.to("foo").cumsum(0) + 1, backend="aot_eager")
    same(function(MATRIX), MATRIX.cumsum(0) + 1)


class Moves(torch.nn.Module):
    def forward(self, x):
        return torch.ones(2, 2, device="foo") + x.to("foo").cumsum(0)


def exported():
    program = torch.export.export(Moves(), (MATRIX,))
    same(program.module()(MATRIX), MATRIX.cumsum(0) + 1)


@torch.jit.script
def sparse_from_cpp(x):
    return x.to("foo").to_sparse().relu().to_dense()


def scripted():
    same(sparse_from_cpp(MATRIX), MATRIX.relu())


def scripted_in_threads():
    """TorchScript runs the calls at the same time, unlike Python functions."""
    in_threads(scripted)


def kinds_in_threads():
    in_threads(*(lambda kind=kind: right(kind) for kind in KINDS))


def fork_after(seconds):
    """Fork after another thread, which does not hold the GIL, has run its first use for a while."""
    empty = aten.empty_strided.default
    thread = threading.Thread(target=empty, args=([2], [1]), kwargs={"device": FOO})
    thread.start()
    time.sleep(seconds)

    def in_child():
        if not torch.foo._is_in_bad_fork():
            right()

    assert succeeds(in_child)
    thread.join()


def forked_meanwhile():
    """A child's device is fully initialised or not at all, never half."""
    for seconds in (0, 0.002, 0.005, 0.01):
        assert succeeds(lambda seconds=seconds: fork_after(seconds))


def operator_of_a_user():
    """A user's kernel registered before the first use takes precedence over the fallback."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("relu", lambda x: x.mul(3), "SparsePrivateUse1")
    same(MATRIX.to("foo").to_sparse().relu(), 3 * MATRIX)
    library._destroy()


def fallback_of_a_user():
    library = torch.library.Library("_", "IMPL", "SparseCsrPrivateUse1")
    library.fallback(lambda operator, *_, **__: torch.full((), len(operator.name())))
    right(dense, sparse, quantized, nested)
    found = aten.empty.memory_format([2, 3], device=FOO, layout=torch.sparse_csr)
    assert found.relu().item() == len("aten::relu")


def fallback_of_a_user_that_comes_late():
    right()
    library = torch.library.Library("_", "IMPL", "SparseCsrPrivateUse1")
    try:
        library.fallback(torch.library.fallthrough_kernel)
    except RuntimeError as error:
        assert "multiple backend fallbacks" in str(error)  # noqa: PT017
    else:
        raise AssertionError("there are two")


WAYS = (
    *(indices_by_operator, sparse_by_operator, empty_sparse_by_operator, compressed_by_operator),
    *(quantized_by_operator, sparse_constructor, compressed_constructor, nested_constructor),
    *(moved, moved_sparse, moved_module, loaded, loaded_sparse, loaded_compressed),
    *(loaded_quantized, storage, allocator, from_dlpack, device_by_name, current_device, stream),
    *(event, generator, pinned, synchronized, gradients, autocast, fakes, compiled, exported),
    *(scripted, scripted_in_threads, kinds_in_threads, forked_meanwhile, operator_of_a_user),
)
OF_USERS = (fallback_of_a_user, fallback_of_a_user_that_comes_late)


def then_right(way):
    def both():
        assert is_cold()
        way()
        right()

    both.__name__ = way.__name__
    return both


def main():
    warnings.simplefilter("ignore")
    print(failures([*map(then_right, WAYS), *OF_USERS]))


if __name__ == "__main__":
    main()
