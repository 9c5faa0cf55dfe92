"""Texts of findings, and what programs can do with them."""

import contextlib
import gc
import re
import threading
import warnings
import weakref

import pytest
import torch
from foo_ops._C import sanitizer as companion
from support.processes import python

from foo_ops import sanitizer


def race(side):
    x = torch.ones(2, 3, device="foo")
    with torch.foo.stream(side):
        x[1].add_(1)


def test_text():
    side = torch.foo.Stream()
    with sanitizer.check() as findings:
        race(side)
    (finding,) = findings
    assert finding.operator == "aten::add_"
    assert finding.shape == (3,)
    assert finding.dtype is torch.float32
    assert finding.device == torch.device("foo:0")
    assert finding.nbytes == 12
    assert finding.streams == (side.stream_id, 0)
    text = re.sub(r"0x[0-9a-f]+", "0x", re.sub(r'File ".*?", line \d+', "File", str(finding)))
    # The test runner has frames on the stack, too.
    own = [
        line for line in text.splitlines() if "<module>" not in line and "run_module" not in line
    ]
    number = side.stream_id
    assert own == [
        "race: tensor of shape (3,) and torch.float32 on foo:0, 12 bytes at 0x",
        f"now: read by aten::add_ on stream {number}",
        "  File, in test_text",
        "    race(side)",
        "  File, in race",
        "    x[1].add_(1)",
        "before: written by aten::fill_ on the default stream",
        "  File, in test_text",
        "    race(side)",
        "  File, in race",
        '    x = torch.ones(2, 3, device="foo")',
        "To fix this: let one stream wait for the other, stream "
        f"{number}.wait_stream(torch.foo.default_stream()), or record an event after the first "
        "access and wait for the event before the second.",
    ]


def test_nothing_is_written_when_it_raises():
    x = torch.ones(4, device="foo")
    sanitizer.enable()
    try:
        x.add_(1)
        with torch.foo.stream(torch.foo.Stream()), pytest.raises(sanitizer.SanitizerError):
            x.add_(1)
    finally:
        sanitizer.disable()
    assert x.tolist() == [2, 2, 2, 2]


def test_warnings():
    sanitizer.enable(action="warn")
    try:
        with pytest.warns(sanitizer.SanitizerWarning, match="^race: ") as warned:
            race(torch.foo.Stream())
    finally:
        sanitizer.disable()
    assert [warning.filename for warning in warned] == [__file__]


def test_an_error_keeps_nothing_alive():
    kept = []

    def host_reads():
        x = torch.ones(4, device="foo").to("cpu", non_blocking=True)
        kept.append(weakref.ref(x))
        x.sum()
        abs(0)

    sanitizer.enable()
    gc.disable()
    try:
        with contextlib.suppress(sanitizer.SanitizerError):
            host_reads()
        assert kept.pop()() is None
    finally:
        gc.enable()
        sanitizer.disable()


def test_check_inside_of_an_enabled_process():
    sanitizer.enable()
    try:
        with sanitizer.check() as findings:
            race(torch.foo.Stream())
        assert len(findings) == 1
        with pytest.raises(sanitizer.SanitizerError):
            race(torch.foo.Stream())
    finally:
        sanitizer.disable()
    assert not sanitizer.is_enabled()
    race(torch.foo.Stream())


def test_enabled_inside_of_check():
    with sanitizer.check() as findings:
        sanitizer.enable()
        race(torch.foo.Stream())
        assert len(findings) == 1
    try:
        with pytest.raises(sanitizer.SanitizerError):
            race(torch.foo.Stream())
    finally:
        sanitizer.disable()


def test_wrong_action():
    with pytest.raises(ValueError, match=r"^enable: action must .* got 'print'$"):
        sanitizer.enable(action="print")
    assert not sanitizer.is_enabled()


def test_whole_process():
    program = """
import torch
x = torch.ones(4, device="foo")
with torch.foo.stream(torch.foo.Stream()):
    x + 1
"""
    run = python(program, FOO_SANITIZER="1")
    assert run.returncode == 1
    assert "SanitizerError: race: tensor of shape (4,)" in run.stderr


def test_wrong_switch():
    run = python("import torch, foo_ops", FOO_SANITIZER="yes")
    assert "ValueError: FOO_SANITIZER must be 0 or 1, got yes" in run.stderr


def test_backward_threads_and_others():
    side = torch.foo.Stream()
    with sanitizer.check() as findings:
        x = torch.ones(4, device="foo", requires_grad=True)

        def work():
            with torch.foo.stream(side):
                x.detach().add_(1)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [finding.kind for finding in findings] == ["race"]
    with sanitizer.check() as findings:
        loss = (x * x).sum()
        loss.backward()
    assert findings == []


def test_memory_is_forgotten():
    with sanitizer.check():
        before, _ = companion.figures()
        tensors = [torch.ones(4, device="foo") for _ in range(100)]
        allocations, _ = companion.figures()
        assert allocations >= before + 100
        del tensors
        gc.collect()
        allocations, _ = companion.figures()
        assert allocations <= before + 1


def test_a_cache_does_not_grow():
    """Rows written one by one become one range after the host has waited."""
    with sanitizer.check() as findings:
        cache = torch.zeros(100, 8, device="foo")
        _, before = companion.figures()
        for row in range(100):
            cache[row] = row
        _, filled = companion.figures()
        assert filled >= before + 90
        cache.sum().item()
        cache.sum()
        _, after = companion.figures()
        assert after <= before + 5
        cache[3] = 1
        with torch.foo.stream(torch.foo.Stream()):
            cache[:3].sum()
            assert findings == []
            cache[3:].sum()
    assert [finding.kind for finding in findings] == ["race"]


def test_ranges_without_end_are_forgotten():
    with sanitizer.check() as findings:
        matrix = torch.empty(100_000, 2, device="foo")
        matrix[:, 0] = 1
        matrix[:, 0].sum()
        matrix.sum()
    assert [finding.kind for finding in findings] == ["uninitialized read"]


def test_threads_that_free_and_allocate():
    """Neither the GIL nor the sanitizer's lock is held while waiting for the other."""
    side = torch.foo.Stream()
    errors = []

    def work():
        try:
            for _ in range(200):
                x = torch.ones(4, device="foo")
                side.wait_stream(torch.foo.current_stream())
                with torch.foo.stream(side):
                    x + 1
                del x
        except Exception as error:
            errors.append(error)

    with sanitizer.check() as findings:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    assert {finding.kind for finding in findings} == {"use after free"}


def test_memory_that_is_older_than_the_check():
    buffer, x = torch.ones(4).pin_memory(), torch.empty(4, device="foo")
    with sanitizer.check() as findings:
        x + 1
        x.copy_(buffer, non_blocking=True)
        buffer.zero_()
    assert [finding.kind for finding in findings] == ["host write during copy"]
    with sanitizer.check() as findings:
        x.add_(1)
        with torch.foo.stream(torch.foo.Stream()):
            x.add_(1)
    assert [finding.kind for finding in findings] == ["race"]


def test_copy_on_write():
    """A write to the clone reads the memory that both share until then."""
    side = torch.foo.Stream()
    with sanitizer.check() as findings:
        x = torch.ones(4, device="foo")
        y = x._lazy_clone()
        side.wait_stream(torch.foo.current_stream())
        with torch.foo.stream(side):
            y.add_(1)
        x.sum()
        torch.foo.current_stream().wait_stream(side)
        (x + y).sum()
    assert findings == []


def test_kernels_that_come_later():
    from foo_ops import library

    with sanitizer.check() as findings:
        library.define("test_sanitizer_late::twice", "(Tensor input) -> Tensor")

        @library.impl("test_sanitizer_late::twice", "foo")
        def twice(input):
            result = torch.empty_like(input)
            return torch.mul(input, 2, out=result)

        x = torch.ops.test_sanitizer_late.twice(torch.ones(4, device="foo"))
        x.sum()
    assert findings == []


def test_compiled_graphs():
    @torch.compile
    def function(x):
        return x.sin() + x.cos().sum()

    with sanitizer.check() as findings:
        x = torch.ones(100, device="foo")
        y = function(x)
        y.sum()
    assert findings == []
    with sanitizer.check() as findings:
        x = torch.ones(100, device="foo")
        with torch.foo.stream(torch.foo.Stream()):
            function(x)
    assert {finding.kind for finding in findings} == {"race"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(torch.ones(100, device="foo"))
