"""The current device, streams and events are those that a program has set."""

import os
import threading

import pytest
import torch
from support.processes import python


@pytest.fixture(autouse=True)
def first_device():
    yield
    assert torch.foo.current_device() == 0
    torch.foo.set_device(0)


def invalid(index):
    return f"foo: device index must be from 0 to 1, got {index}"


def test_two_devices():
    assert torch.foo.is_available()
    assert torch.foo.device_count() == 2
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("foo")
    assert torch.get_device_module("foo") is torch.foo


def test_set_device():
    torch.foo.set_device("foo:1")
    assert torch.foo.current_device() == 1
    assert torch.empty(1, device="foo").device == torch.device("foo:1")
    torch.foo.set_device(-1)
    assert torch.foo.current_device() == 1
    torch.foo.set_device(torch.device("foo", 0))
    assert torch.empty(1, device="foo").device == torch.device("foo:0")


@pytest.mark.parametrize("index", [2, 300])
def test_invalid_index(index):
    with pytest.raises(RuntimeError, match=invalid(index)):
        torch.foo.set_device(index)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(1, device="foo:5"),
        lambda: torch.ones(1).to("foo:5"),
        lambda: torch.foo.synchronize(5),
        lambda: torch.foo.current_stream(5),
        lambda: torch.foo.memory_allocated(5),
        lambda: torch.foo.get_rng_state(5),
        lambda: torch.Stream(device="foo:5"),
        lambda: torch.Generator("foo:5"),
        lambda: torch.accelerator.set_device_index(5),
        lambda: torch.foo.device(5).__enter__(),
        lambda: torch.foo.can_device_access_peer(5, 0),
        lambda: torch.foo.can_device_access_peer(0, 5),
    ],
)
def test_invalid_device(call):
    with pytest.raises(RuntimeError, match=invalid(5)):
        call()


def test_other_device_types_are_refused():
    with pytest.raises(ValueError, match=r"^Expected a foo device, but got: cpu$"):
        torch.foo.set_device("cpu")
    with pytest.raises(TypeError, match=r"^Expected a torch.device, a string or an integer"):
        torch.foo.synchronize(1.5)
    with pytest.raises(ValueError, match=r"^Expected a torch.device with a specified index"):
        torch.foo.set_device("foo")


def test_device_context():
    with torch.foo.device(1):
        assert torch.foo.current_device() == 1
        with torch.foo.device("foo:0"):
            assert torch.foo.current_device() == 0
        with torch.foo.device(-1):
            assert torch.foo.current_device() == 1
        assert torch.foo.current_device() == 1
    with pytest.raises(KeyError), torch.foo.device(1):
        raise KeyError
    assert torch.foo.current_device() == 0


def test_device_of():
    with torch.foo.device_of(torch.ones(1, device="foo:1")):
        assert torch.foo.current_device() == 1
    with torch.foo.device_of(torch.ones(1)):
        assert torch.foo.current_device() == 0


def test_operators_leave_the_current_device_alone():
    tensor = torch.ones(3, device="foo:1")
    (tensor + 1).cpu()
    tensor.to("foo:0").resize_(100)
    assert torch.foo.current_device() == 0


def test_current_device_belongs_to_the_thread():
    seen = []
    with torch.foo.device(1):
        thread = threading.Thread(target=lambda: seen.append(torch.foo.current_device()))
        thread.start()
        thread.join()
    assert seen == [0]


def test_device_properties():
    properties = torch.foo.get_device_properties("foo:1")
    assert properties.name == torch.foo.get_device_name(1)
    assert properties.total_memory > 0
    assert properties.multi_processor_count == os.cpu_count()
    assert torch.float32 in torch.accelerator.get_device_capability("foo:1")["supported_dtypes"]


def test_abilities():
    assert torch.foo.can_device_access_peer(0, "foo:1")
    assert not torch.foo.can_device_access_peer(None, 0)
    assert torch.foo.is_bf16_supported()
    assert not torch.foo.is_tf32_supported()
    assert not torch.foo.is_current_stream_capturing()
    assert torch.foo.get_allocator_backend() == "native"
    assert torch.foo.OutOfMemoryError is torch.OutOfMemoryError
    assert torch.foo.ipc_collect() is None


def test_streams():
    stream = torch.Stream(device="foo:1")
    assert stream != torch.Stream(device="foo:1")
    assert torch.foo.current_stream(1) == torch.foo.default_stream(1)
    with torch.foo.stream(stream):
        assert torch.foo.current_device() == 1
        assert torch.foo.current_stream() == stream
        assert stream.query()
        stream.synchronize()
    assert torch.foo.current_stream(1) == torch.foo.default_stream(1)
    with torch.foo.stream(None) as entered:
        assert torch.foo.current_device() == 0
        assert entered is None
    torch.ones(2, device="foo").record_stream(stream)


def test_contexts_restore_after_an_exception():
    before = torch.foo.current_stream(1)
    stream = torch.Stream(device="foo:1")
    with pytest.raises(KeyError), torch.foo.stream(stream):
        raise KeyError
    assert torch.foo.current_stream(1) == before
    assert torch.foo.current_device() == 0
    with pytest.raises(KeyError), torch.accelerator.device_index(1):
        raise KeyError
    assert torch.foo.current_device() == 0


def test_stream_contexts_nest():
    """Each context restores the device and that device's stream, also when used twice."""
    outer, inner = (torch.Stream(device=f"foo:{index}") for index in range(2))
    context = torch.foo.StreamContext(inner)
    for _ in range(2):
        with torch.foo.stream(outer):
            with context:
                assert (torch.foo.current_stream(0), torch.foo.current_stream(1)) == (outer, inner)
                with torch.foo.stream(outer):
                    assert torch.foo.current_device() == 0
                assert torch.foo.current_stream() == inner
            assert torch.foo.current_stream(1) == torch.foo.default_stream(1)
            assert torch.foo.current_stream() == outer
        assert torch.foo.current_stream() == torch.foo.default_stream(0)


def test_set_stream():
    stream = torch.Stream(device="foo:0")
    torch.foo.set_stream(stream)
    assert torch.foo.current_stream(0) == stream
    torch.foo.set_stream(None)
    assert torch.foo.current_stream(0) == stream
    torch.foo.set_stream(torch.foo.default_stream(0))
    assert torch.foo.current_stream(0).stream_id == 0


def test_events_measure_time():
    start, end = (torch.Event("foo", enable_timing=True) for _ in range(2))
    assert start.query()
    stream = torch.foo.current_stream()
    start.record(stream)
    torch.rand(300, 300, device="foo") @ torch.rand(300, 300, device="foo")
    end.record(stream)
    end.wait(stream)
    end.synchronize()
    assert end.query()
    assert 0 < start.elapsed_time(end) < 60_000
    assert end.elapsed_time(start) == -start.elapsed_time(end)
    with pytest.raises(ValueError, match="enable_timing=True"):
        torch.Event("foo").elapsed_time(end)
    passed = start.elapsed_time(end)
    end.record(stream)
    assert start.elapsed_time(end) > passed


def test_event_stays_on_its_device():
    event = torch.Event("foo")
    event.record(torch.foo.current_stream(0))
    message = "foo: event of device foo:0 cannot be recorded on a stream of device foo:1"
    with pytest.raises(RuntimeError, match=message):
        event.record(torch.foo.default_stream(1))


def test_device_count_from_the_environment():
    program = "import torch; print(torch.foo.device_count(), torch.ones(1, device='foo:4').device)"
    result = python(program, FOO_DEVICE_COUNT="5")
    assert result.stdout.split() == ["5", "foo:4"], result.stderr


@pytest.mark.parametrize("value", ["", "0", "65", "2.5"])
def test_bad_device_count(value):
    result = python("import torch", FOO_DEVICE_COUNT=value)
    assert result.returncode != 0
    message = f"ValueError: FOO_DEVICE_COUNT must be an integer from 1 to 64, got '{value}'"
    assert message in result.stderr.splitlines()


def test_elapsed_time_of_two_devices():
    events = []
    for index in range(2):
        events.append(torch.foo.Event(enable_timing=True))
        events[-1].record(torch.foo.default_stream(index))
    message = "foo: both events must be of the same device, got one of foo:0 and one of foo:1"
    with pytest.raises(RuntimeError, match=message):
        events[0].elapsed_time(events[1])
