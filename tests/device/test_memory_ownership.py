"""Memory that CPU kernels keep, move or share stays valid for them and for foo's tensors."""

import pytest
import torch
from support.processes import python

from foo_ops.device import _registration

SIZE = 1 << 16

library = torch.library.Library("ownership", "FRAGMENT")


def define(schema, kernel):
    """Define a new operator with a Python kernel for the CPU."""
    library.define(schema)
    name = schema.partition("(")[0]
    library.impl(name, kernel, "CPU")
    return getattr(torch.ops.ownership, name)


def run(code):
    """Run the code in a separate process, since the tested error would crash this one."""
    result = python(code)
    assert result.returncode == 0, (result.returncode, result.stderr)
    return result.stdout


def overwrite_free_memory(size=SIZE):
    torch.foo.empty_cache()
    for _ in range(8):
        torch.full((size,), -1.0, device="foo")


def table():
    return torch.arange(float(SIZE))


kept: dict[str, torch.Tensor] = {}


def keep(name):
    if name not in kept:
        kept[name] = table()
    return kept[name]


def keep_a_view(name):
    keep_whole = kept.setdefault(name, table()[1:])
    return keep_whole[: SIZE - 1]


kinds = {
    "whole": define("whole(Tensor x) -> Tensor", lambda x: keep("whole")),
    "view": define("view(Tensor x) -> Tensor", lambda x: keep("view")[1:]),
    "reshaped": define("reshaped(Tensor x) -> Tensor", lambda x: keep("reshaped").view(2, -1)),
    "kept_view": define("kept_view(Tensor x) -> Tensor", lambda x: keep_a_view("kept_view")),
    "listed": define("listed(Tensor x) -> Tensor[]", lambda x: [x + 1, keep("listed")]),
    "several": define("several(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, keep("several"))),
}


def kept_part(result):
    return result if isinstance(result, torch.Tensor) else result[-1]


@pytest.mark.parametrize("first_on", ["foo", "cpu"])
@pytest.mark.parametrize("kind", kinds)
def test_a_kernel_that_keeps_its_result(kind, first_on):
    kept.clear()
    expected = kept_part(kinds[kind](torch.ones(1))).clone()
    kept.clear()
    kinds[kind](torch.ones(1, device=first_on))
    overwrite_free_memory()
    assert kept_part(kinds[kind](torch.ones(1, device="foo"))).cpu().equal(expected)
    overwrite_free_memory()
    assert kept[kind].sum() == (table()[1:] if kind == "kept_view" else table()).sum()
    result = kept_part(kinds[kind](torch.ones(1, device="foo")))
    kept.clear()
    overwrite_free_memory()
    assert result.cpu().equal(expected)


def test_the_result_shares_memory_with_what_the_kernel_keeps(device):
    kept.clear()
    result = kinds["whole"](torch.ones(1, device=device))
    result[0] = 7
    assert kept["whole"][0] == 7
    assert kinds["whole"](torch.ones(1, device=device))[0] == 7


def test_memory_is_counted_until_the_kernel_lets_go():
    kept.clear()
    before = torch.foo.memory_allocated()
    result = kinds["whole"](torch.ones(1, device="foo"))
    assert torch.foo.memory_allocated() - before == SIZE * 4
    del result
    assert torch.foo.memory_allocated() - before == SIZE * 4
    kept.clear()
    assert torch.foo.memory_allocated() == before


twice = define("twice(Tensor x) -> (Tensor, Tensor)", lambda x: (x * 2,) * 2)


def test_one_result_that_is_returned_twice(device):
    first, second = twice(torch.ones(3, device=device))
    assert first is second


workspace = torch.empty(0)


def grow_workspace(x):
    return torch.add(x, 1, out=workspace.resize_(x.shape))


grow = define("grow(Tensor x) -> Tensor", grow_workspace)


def test_a_workspace_that_grows():
    results = [grow(torch.full((size,), 1.0, device="foo")) for size in (10, 100, SIZE, 10 * SIZE)]
    overwrite_free_memory()
    assert results[-1].eq(2).all()
    results[0].cpu()
    assert results[-1].untyped_storage().nbytes() == 40 * SIZE


def resize_kept(x):
    result = torch.ops.ownership.whole(x)
    if x.numel() > 1:
        kept["whole"].untyped_storage().resize_(0)
    return result


resize_result = define("resize_result(Tensor x) -> Tensor", resize_kept)


def test_memory_of_the_cpu_cannot_move_while_foo_shares_it():
    kept.clear()
    kept["whole"] = table()
    shared = kinds["whole"](torch.ones(1, device="foo"))
    with pytest.raises(RuntimeError, match="Trying to resize storage that is not resizable"):
        resize_result(torch.ones(2, device="foo"))
    assert shared.cpu().equal(table())


WAYS_TO_MOVE = {
    "empty": "x.untyped_storage().resize_(0)",
    "grow": "x.untyped_storage().resize_(1 << 24)",
    "resize": "x.resize_(1 << 22)",
    "set": "x.set_()",
    "data": "x.data = torch.empty(0, device='foo')",
    "send": "_registration._reduce(x.untyped_storage())",
    "delete": "del x",
}


@pytest.mark.parametrize("way", WAYS_TO_MOVE)
def test_a_kernel_that_keeps_its_argument(way):
    run(f"""
import torch
from foo_ops.device import _registration

kept = []
library = torch.library.Library("keeping", "FRAGMENT")
library.define("keep(Tensor x) -> ()")
library.impl("keep", kept.append, "CPU")
x = torch.ones(1 << 20, device="foo")
torch.ops.keeping.keep(x)
{WAYS_TO_MOVE[way]}
torch.foo.empty_cache()
others = [torch.full((1 << 20,), 2.0, device="foo") for _ in range(8)]
assert kept[0].sum() == 1 << 20
kept[0] += 1
assert all((other == 2).all() for other in others)
""")


arguments: list[torch.Tensor] = []
take = define("take(Tensor x) -> ()", arguments.append)
give = define("give(Tensor x) -> Tensor", lambda x: arguments.pop())


def test_an_argument_that_another_call_returns(device):
    x = torch.zeros(3, device=device)
    take(x)
    result = give(torch.ones(1, device=device))
    assert result.untyped_storage()._cdata == x.untyped_storage()._cdata
    result += 1
    assert x.tolist() == [1, 1, 1]


def test_an_argument_that_another_call_returns_after_it_has_moved():
    x = torch.ones(SIZE, device="foo")
    take(x)
    x.untyped_storage().resize_(0)
    overwrite_free_memory()
    result = give(torch.ones(1, device="foo"))
    overwrite_free_memory()
    assert result.device.type == "foo"
    assert result.eq(1).all()


def test_nothing_is_left_of_kept_arguments():
    before = torch.foo.memory_allocated()
    for change in (lambda x: None, lambda x: x.share_memory_(), lambda x: x.resize_(2 * SIZE)):
        arguments.clear()
        x = torch.ones(SIZE, device="foo")
        take(x)
        changed.kernel = change
        changed(x)
        assert x[:SIZE].eq(1).all()
        result = give(torch.ones(1, device="foo"))
        del x, result
        assert torch.foo.memory_allocated() == before


class Changed:
    """An operator that calls ``kernel`` on its argument."""

    def __init__(self):
        self.kernel = None
        self.operator = define("change(Tensor(a!) x) -> ()", lambda x: self._run(x))

    def _run(self, x):
        self.kernel(x)

    def __call__(self, x):
        self.operator(x)


changed = Changed()


def raise_after(change):
    def kernel(x):
        change(x)
        raise RuntimeError("in the middle")

    return kernel


CHANGES = {
    "grow": lambda x: x.resize_(1 << 20).fill_(3),
    "empty": lambda x: x.resize_(0),
    "no_bytes": lambda x: x.untyped_storage().resize_(0),
    "set": lambda x: x.set_(torch.full((1 << 20,), 3.0)),
    "data": lambda x: setattr(x, "data", torch.full((1 << 20,), 3.0)),
    "transpose": lambda x: x.resize_(2, SIZE // 2).t_(),
    "share": lambda x: x.share_memory_().fill_(3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_kernel_that_moves_its_argument(name, device):
    x = torch.ones(SIZE, device=device)
    view = x[:2]
    changed.kernel = CHANGES[name]
    changed(x)
    expected = torch.ones(SIZE)
    CHANGES[name](expected)
    assert x.device.type == device
    assert x.shape == expected.shape
    assert x.stride() == expected.stride()
    assert x.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    if name != "no_bytes":
        assert x.cpu().equal(expected)
        assert view.untyped_storage().nbytes() >= 8


@pytest.mark.parametrize("name", CHANGES)
def test_a_kernel_that_fails_in_the_middle(name):
    """Writes before the error remain, as on the CPU, and the memory stays valid."""
    before = torch.foo.memory_allocated()
    x = torch.ones(SIZE, device="foo")
    expected = torch.ones(SIZE)
    changed.kernel = raise_after(CHANGES[name])
    for tensor in (x, expected):
        with pytest.raises(RuntimeError, match="in the middle"):
            changed(tensor)
    overwrite_free_memory()
    assert x.shape == expected.shape
    assert x.stride() == expected.stride()
    assert x.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    if name != "no_bytes":
        assert x.cpu().equal(expected)
    del x
    assert torch.foo.memory_allocated() == before


MEANWHILE = {
    "set": lambda x, other: x.set_(other),
    "resize": lambda x, other: x.resize_(3),
    "grow": lambda x, other: x.untyped_storage().resize_(64),
    "empty": lambda x, other: x.resize_(0).untyped_storage().resize_(0),
    "data": lambda x, other: setattr(x, "data", other),
    "transpose": lambda x, other: x.t_(),
    "send": lambda x, other: _registration._reduce(x.untyped_storage()),
}


@pytest.mark.parametrize("name", MEANWHILE)
def test_what_the_kernel_left_alone_is_not_written_back(name):
    """The kernel itself changes the tensor of foo, in place of another thread."""
    x = torch.zeros(2, 2, device="foo")
    other = torch.arange(4.0, device="foo")

    def look():
        return x.shape, x.stride(), x.data_ptr(), x.untyped_storage().nbytes()

    seen = []

    def kernel(host):
        MEANWHILE[name](x, other)
        host.add_(1)
        seen.append(look())

    changed.kernel = kernel
    changed(x)
    assert look() == seen[0]
    assert other.tolist() == [0, 1, 2, 3]


def is_lazy(tensor):
    return torch._C._is_cow_tensor(tensor)


READERS = {
    "sum": lambda x: x.sum(),
    "add": lambda x: x + 1,
    "cpu": lambda x: x.cpu(),
    "foo:1": lambda x: x.to("foo:1"),
    "item": lambda x: x[0].item(),
    "source": lambda x: torch.zeros(SIZE, device="foo").copy_(x),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0, device="foo")),
    "matmul": lambda x: x.view(256, -1) @ x.view(256, -1),
    "list": lambda x: torch._foreach_add([x, x], 1),
}


@pytest.mark.parametrize("name", READERS)
def test_reading_does_not_copy_memory_that_is_copied_on_writing(name):
    x = torch.ones(SIZE, device="foo")
    lazy = torch._lazy_clone(x)
    READERS[name](lazy)
    READERS[name](x)
    assert is_lazy(lazy)
    assert is_lazy(x)
    assert torch._C._data_address(lazy) == torch._C._data_address(x)


WRITERS = {
    "add_": lambda x: x.add_(1),
    "copy_": lambda x: x.copy_(torch.full((SIZE,), 2.0)),
    "copy_ on foo": lambda x: x.copy_(torch.full((SIZE,), 2.0, device="foo:1")),
    "out": lambda x: torch.add(x, 1, out=x),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "fill_": lambda x: x.fill_(2),
    "view": lambda x: x.view(2, -1).t().add_(1),
    "kernel": lambda x: changed(x),
    "read and written": lambda x: torch.mul(x, x, out=x).add_(1),
}


@pytest.mark.parametrize("name", WRITERS)
def test_writing_copies_memory_that_is_copied_on_writing(name):
    changed.kernel = lambda x: x.add_(1)
    for written in (0, 1):
        x = torch.ones(SIZE, device="foo")
        pair = x, torch._lazy_clone(x)
        WRITERS[name](pair[written])
        assert not is_lazy(pair[written])
        assert pair[written].eq(2).all()
        assert pair[1 - written].eq(1).all()
        WRITERS[name](pair[1 - written])
        assert pair[1 - written].eq(2).all()


def test_memory_that_is_copied_on_writing_is_freed():
    before = torch.foo.memory_allocated()
    x = torch.ones(SIZE, device="foo")
    lazy = torch._lazy_clone(x)
    take(lazy)
    lazy += 1
    arguments.clear()
    del x, lazy
    assert torch.foo.memory_allocated() == before


def test_what_a_kernel_keeps_is_not_part_of_a_lazy_clone():
    kept.clear()
    result = kinds["whole"](torch.ones(1, device="foo"))
    clone = torch._lazy_clone(result)
    kept["whole"][0] = 7
    result[1] = 8
    assert clone[:2].tolist() == [0, 1]
