"""Programs on streams for the sanitizer: pairs of a wrong and a right one for each finding.

Each is a function of two streams. The wrong one leaves out the synchronisation of the right one.
"""

import torch
from support import host_streams
from support.stream_helpers import SIZE, default, on, ones, pinned

# race


def result_of_another_stream(side, other, *, right):
    x = ones()
    if right:
        side.wait_stream(default())
    with on(side):
        x.mul(2)


def result_comes_back(side, other, *, right):
    with on(side):
        x = ones()
    event = side.record_event()
    if right:
        default().wait_event(event)
    x + 1


def write_after_read(side, other, *, right):
    x = ones()
    side.wait_stream(default())
    with on(side):
        x.sum()
    if right:
        default().wait_stream(side)
    x.zero_()


def event_too_early(side, other, *, right):
    x = ones()
    event = torch.foo.Event()
    if not right:
        event.record()
    x.add_(1)
    if right:
        event.record()
    event.wait(side)
    with on(side):
        x.sum()


def halves_that_overlap(side, other, *, right):
    x = ones()
    side.wait_stream(default())
    with on(side):
        x[: SIZE // 2].add_(1)
    x[SIZE // 2 if right else SIZE // 2 - 1 :].add_(1)


def columns_that_overlap(side, other, *, right):
    x = torch.ones(SIZE, 10, device="foo")
    side.wait_stream(default())
    with on(side):
        x[:, :5].add_(1)
    x[:, 5 if right else 4 :].add_(1)


def chain_of_streams(side, other, *, right):
    x = ones()
    side.wait_stream(default())
    with on(side):
        x.add_(1)
    if right:
        other.wait_stream(side)
    else:
        other.wait_stream(default())
    with on(other):
        x.add_(1)


def synchronize_the_wrong_stream(side, other, *, right):
    with on(side):
        x = ones()
    (side if right else other).synchronize()
    x + 1


def gradients_on_another_stream(side, other, *, right):
    x = torch.ones(SIZE, device="foo", requires_grad=True)
    (x * x).sum().backward()
    if right:
        side.wait_stream(default())
    with on(side):
        x.grad.add_(1)


def reused_pinned_buffer(side, other, *, right):
    buffer = pinned()
    buffer.copy_(ones(), non_blocking=True)
    if right:
        side.wait_stream(default())
    with on(side):
        buffer.to("foo", non_blocking=True)


# use after free


def freed_while_read(side, other, *, right):
    x = ones()
    side.wait_stream(default())
    with on(side):
        x.sum()
    if right:
        x.record_stream(side)
    del x
    ones()


def freed_while_written(side, other, *, right):
    x = ones()
    side.wait_stream(default())
    with on(side):
        x.add_(1)
    if right:
        x.record_stream(side)
    del x
    torch.empty(SIZE, device="foo")


def freed_on_the_side(side, other, *, right):
    with on(side):
        x = ones()
    default().wait_stream(side)
    x.sum()
    if right:
        x.record_stream(default())
    del x
    with on(side):
        ones()


def freed_with_a_view(side, other, *, right):
    x = ones()
    view = x[10:20]
    side.wait_stream(default())
    with on(side):
        view.sum()
    if right:
        view.record_stream(side)
    del x, view
    ones()


def freed_before_the_wait(side, other, *, right):
    x = ones()
    side.wait_stream(default())
    with on(side):
        x.sum()
    del x
    if right:
        default().wait_stream(side)
    ones()
    default().wait_stream(side)


def recorded_for_another_stream(side, other, *, right):
    x = ones()
    side.wait_stream(default())
    with on(side):
        x.sum()
    x.record_stream(side if right else other)
    del x
    ones()


def source_of_a_copy(side, other, *, right):
    x = ones()
    buffer = pinned()
    side.wait_stream(default())
    with on(side):
        buffer.copy_(x, non_blocking=True)
    if right:
        side.synchronize()
    del x
    ones()
    side.synchronize()


# uninitialized read


def empty(side, other, *, right):
    x = torch.empty(SIZE, device="foo")
    if right:
        x.fill_(1)
    x + 1


def one_element_is_missing(side, other, *, right):
    x = torch.empty(SIZE, device="foo")
    x[1 if not right else 0 :] = 1
    x.sum()


def update_of_empty(side, other, *, right):
    x = (torch.zeros if right else torch.empty)(SIZE, device="foo")
    x += 1


def copied_to_the_host(side, other, *, right):
    x = torch.empty_like(ones())
    if right:
        x.copy_(ones())
    x.cpu()


def grown(side, other, *, right):
    x = torch.ones(10, device="foo")
    x.resize_(20)
    (x[:10] if right else x).sum()


def columns_of_empty(side, other, *, right):
    x = torch.empty(SIZE, 2, device="foo")
    x[:, 0] = 1
    if right:
        x[:, 1] = 1
    x @ torch.ones(2, device="foo")


def clone_of_empty(side, other, *, right):
    x = torch.empty(SIZE, device="foo").clone()
    if right:
        x.zero_()
    x.sum()


def beta_that_counts(side, other, *, right):
    x = torch.empty(4, 4, device="foo")
    factor = torch.ones(4, 4, device="foo")
    torch.addmm(x, factor, factor, beta=0 if right else 1)


def indexed_out_of_empty(side, other, *, right):
    table = torch.empty(SIZE, 4, device="foo")
    if right:
        table[3] = 1
    table.index_select(0, torch.tensor([3], device="foo"))


PAIRS = {
    "race": [
        result_of_another_stream,
        result_comes_back,
        write_after_read,
        event_too_early,
        halves_that_overlap,
        columns_that_overlap,
        chain_of_streams,
        synchronize_the_wrong_stream,
        gradients_on_another_stream,
        reused_pinned_buffer,
    ],
    "use after free": [
        freed_while_read,
        freed_while_written,
        freed_on_the_side,
        freed_with_a_view,
        freed_before_the_wait,
        recorded_for_another_stream,
        source_of_a_copy,
    ],
    "unsynchronized host read": [
        host_streams.sum_of_a_copy,
        host_streams.item_of_a_copy,
        host_streams.event_of_another_stream,
        host_streams.copy_to_the_part_that_is_read,
        host_streams.query_says_done,
        host_streams.numpy_reads_a_copy,
        host_streams.list_of_a_copy,
        host_streams.c_reads_a_copy,
        host_streams.numpy_reads_without_the_gil,
    ],
    "host write during copy": [
        host_streams.fill_after_copy,
        host_streams.next_batch,
        host_streams.write_the_target,
        host_streams.update_in_place,
        host_streams.write_the_part_that_is_copied,
        host_streams.numpy_writes_during_a_copy,
        host_streams.c_writes_during_a_copy,
        host_streams.numpy_writes_the_target,
        host_streams.numpy_writes_what_follows,
    ],
    "uninitialized read": [
        empty,
        one_element_is_missing,
        update_of_empty,
        copied_to_the_host,
        grown,
        columns_of_empty,
        clone_of_empty,
        beta_that_counts,
        indexed_out_of_empty,
    ],
}
