"""Let tile kernels check that each access is inside of its tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from foo_ops import _C
from foo_ops._switches import switch

if switch("FOO_CHECK_BOUNDS"):
    _C.ask_for_bounds_checks()


@contextlib.contextmanager
def check_bounds() -> Iterator[None]:
    """Check every access of tile kernels that are called meanwhile, on all threads.

    An access outside of its tensor is not performed: what is read is 0, and nothing is written.
    When the kernel is done, the operator raises an IndexError, which names the operator, the first
    such access with its indices, the shape, and the line of the kernel. A kernel that checks is
    compiled by itself, and is slower; calls outside of the context are as fast as ever.

    An offset into ``x.data`` must lie between the first element and the last one, but may fall
    between two. An address that a kernel takes with `foo_ops.language.address_of` is not checked.

    ``FOO_CHECK_BOUNDS=1`` in the environment does the same for the whole process, and
    `foo_ops.testing` for every operator that it checks.

    Example:
        >>> foo_ops.library.define("mylib::ones", "(Tensor input) -> Tensor")
        >>> @foo_ops.library.register_fake("mylib::ones")
        ... def ones_fake(input):
        ...     return torch.empty_like(input)
        >>> @foo_ops.library.register_kernel("mylib::ones", "cpu")
        ... @foo_ops.library.tile_kernel
        ... def ones(input, output, rows):
        ...     for row in rows:
        ...         for i in range(6):
        ...             output[row, i] = 1.0
        >>> with foo_ops.library.check_bounds():
        ...     try:
        ...         torch.ops.mylib.ones(torch.empty(2, 5))
        ...     except IndexError as error:
        ...         print(str(error).partition(" (")[0])
        ones: output[0, 5] is outside of output, which has shape [2, 5]
    """
    _C.ask_for_bounds_checks()
    try:
        yield
    finally:
        _C.end_bounds_checks()
