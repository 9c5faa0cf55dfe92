"""torch.foo.set_sync_debug_mode names the operators that make the host wait."""

import re

import pytest
import torch


@pytest.fixture
def mode():
    yield torch.foo.set_sync_debug_mode
    torch.foo.set_sync_debug_mode("default")


WAITING = {
    "item": (lambda x: x[0].item(), "aten::item"),
    "bool": (lambda x: bool(x[0]), "aten::item"),
    "int": (lambda x: int(x[0]), "aten::item"),
    "cpu": (lambda x: x.cpu(), "aten::copy_"),
    "tolist": (lambda x: x.tolist(), "aten::copy_"),
    "from cpu": (lambda x: torch.ones(4).to("foo"), "aten::copy_"),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero"),
    "mask": (lambda x: x[x > 0], "aten::index"),
    "written by mask": (lambda x: x.index_put_((x > 0,), x[0]), "aten::_index_put_impl_"),
    "masked_select": (lambda x: x.masked_select(x > 0), "aten::masked_select"),
    "unique": (lambda x: x.unique(), "aten::_unique2"),
    "equal": (lambda x: torch.equal(x, x + 1), "aten::equal"),
    "repeat_interleave": (
        lambda x: x.repeat_interleave(torch.ones(4, dtype=int, device="foo")),
        "aten::repeat_interleave",
    ),
}
NOT_WAITING = {
    "sum": lambda x: x.sum(),
    "non_blocking": lambda x: x.to("cpu", non_blocking=True),
    "synchronize": lambda x: torch.foo.synchronize(),
    "index": lambda x: x[torch.arange(2, device="foo")],
    "output_size": lambda x: x.repeat_interleave(
        torch.ones(4, dtype=int, device="foo"), output_size=4
    ),
    "another device": lambda x: x.to("foo:1"),
    "fill": lambda x: x.fill_(1),
}


def message(name):
    return f"^{name}: called a synchronizing operation: the host waits for the device"


@pytest.mark.parametrize("name", WAITING)
def test_error(mode, name):
    function, operator = WAITING[name]
    x = torch.ones(4, device="foo")
    function(x)
    mode("error")
    with pytest.raises(RuntimeError, match=message(operator)):
        function(x)
    mode("default")
    function(x)


@pytest.mark.parametrize("name", WAITING)
def test_warning(mode, name):
    function, operator = WAITING[name]
    x = torch.ones(4, device="foo")
    mode("warn")
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match=message(operator)):
            function(x)
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("name", NOT_WAITING)
def test_others_are_left_alone(mode, name):
    x = torch.ones(4, device="foo")
    mode("error")
    NOT_WAITING[name](x)


@pytest.mark.parametrize(("given", "got"), [("default", 0), ("warn", 1), ("error", 2), (1, 1)])
def test_modes(mode, given, got):
    mode(given)
    assert torch.foo.get_sync_debug_mode() == got


@pytest.mark.parametrize("wrong", ["loud", 3, -1, None])
def test_wrong_mode(wrong):
    message = (
        'set_sync_debug_mode: debug_mode must be "default", "warn", "error", 0, 1 or 2, '
        f"got {wrong!r}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        torch.foo.set_sync_debug_mode(wrong)
