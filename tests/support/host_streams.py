"""Programs in which the host reads or writes pinned memory while copies run."""

import ctypes

import torch
from support.stream_helpers import SIZE, default, on, ones, pinned

# unsynchronized host read


def sum_of_a_copy(side, other, *, right):
    host = ones().to("cpu", non_blocking=True)
    if right:
        default().synchronize()
    host.sum()


def item_of_a_copy(side, other, *, right):
    host = pinned()
    host.copy_(ones(), non_blocking=True)
    if right:
        torch.accelerator.synchronize()
    host[0].item()


def event_of_another_stream(side, other, *, right):
    with on(side):
        host = ones().to("cpu", non_blocking=True)
        event = side.record_event()
    (event if right else default()).synchronize()
    host + 1


def copy_to_the_part_that_is_read(side, other, *, right):
    host = pinned()
    host[:10].copy_(ones()[:10], non_blocking=True)
    host[10 if right else 9 :].sum()
    default().synchronize()


def query_says_done(side, other, *, right):
    host = ones().to("cpu", non_blocking=True)
    event = default().record_event()
    if right:
        event.query()
    host.sum()


def numpy_reads_a_copy(side, other, *, right):
    host = ones().to("cpu", non_blocking=True)
    if right:
        default().synchronize()
    host.numpy().sum()


def list_of_a_copy(side, other, *, right):
    host = ones().to("cpu", non_blocking=True)
    if right:
        default().synchronize()
    host.tolist()


def c_reads_a_copy(side, other, *, right):
    host = pinned()
    with on(side):
        host.copy_(ones(), non_blocking=True)
    (side if right else other).synchronize()
    ctypes.string_at(host.data_ptr(), 16)


def numpy_reads_without_the_gil(side, other, *, right):
    host = torch.ones(1 << 20, device="foo").to("cpu", non_blocking=True)
    event = default().record_event()
    if right:
        event.synchronize()
    host.numpy() + 1


# host write during copy


def fill_after_copy(side, other, *, right):
    host = pinned()
    host.to("foo", non_blocking=True)
    if right:
        default().synchronize()
    host.fill_(2)


def next_batch(side, other, *, right):
    host = pinned()
    device = torch.empty(SIZE, device="foo")
    for _ in range(2):
        if right:
            default().synchronize()
        host.copy_(torch.arange(float(SIZE)))
        device.copy_(host, non_blocking=True)


def write_the_target(side, other, *, right):
    host = ones().to("cpu", non_blocking=True)
    if right:
        default().synchronize()
    host.zero_()


def update_in_place(side, other, *, right):
    host = pinned()
    with on(side):
        host.to("foo", non_blocking=True)
    (side if right else default()).synchronize()
    host.mul_(2)


def write_the_part_that_is_copied(side, other, *, right):
    host = pinned()
    host[:10].to("foo", non_blocking=True)
    host[10 if right else 9 :].zero_()
    default().synchronize()


def numpy_writes_during_a_copy(side, other, *, right):
    host = pinned()
    host.to("foo", non_blocking=True)
    # Reading is harmless.
    host.numpy().sum()
    if right:
        default().synchronize()
    host.numpy()[:] = 2


def c_writes_during_a_copy(side, other, *, right):
    host = pinned()
    host.to("foo", non_blocking=True)
    if right:
        torch.accelerator.synchronize()
    ctypes.memset(host.data_ptr(), 0, 16)


def numpy_writes_the_target(side, other, *, right):
    host = ones().to("cpu", non_blocking=True)
    if right:
        default().synchronize()
    host.numpy().fill(2)


def numpy_writes_what_follows(side, other, *, right):
    host = pinned()
    host[: SIZE // 2].to("foo", non_blocking=True)
    host.numpy()[SIZE // 2 if right else SIZE // 2 - 1 :] = 2
    default().synchronize()
