"""Matrix products of bytes, on the matrix unit if there is one."""

import itertools

import pytest
import torch

from foo_ops.kernels.products.on_amx import GROUP, make_amx_products_of_bytes
from foo_ops.kernels.simd.memory import pointer_to

DTYPES = {"int8": torch.int8, "uint8": torch.uint8}
# Fills memory that must not be written.
GUARD = 123_456_789


@pytest.fixture(scope="module", params=itertools.product(DTYPES, repeat=2), ids="-".join)
def multiply(compiled, request):
    """Provide two dtypes, and the kernel that multiplies them."""
    matmul, begin, end = make_amx_products_of_bytes(*request.param)
    sums, fours = pointer_to("int32"), pointer_to("int8x4")

    def kernel(c, c_stride, a, a_row, a_group, b, b_stride, rows, columns, steps, accumulate):
        begin()
        matmul(
            sums(c), c_stride, (fours(a), a_row, a_group, 0), (fours(b), b_stride, 0),
            rows, columns, steps, accumulate != 0, True,
        )  # fmt: skip
        end()

    return *(DTYPES[name] for name in request.param), compiled(kernel)


def whole_range(shape, dtype, seed):
    """Make random bytes; two rows and two columns hold the extremes."""
    info, generator = torch.iinfo(dtype), torch.Generator().manual_seed(seed)
    result = torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=dtype)
    result[0], result[1:2], result[:, 0], result[:, 1] = info.min, info.max, info.max, info.min
    return result


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 48])
@pytest.mark.parametrize("columns", [16, 32, 48])
def test_shapes(multiply, rows, columns):
    first, second, kernel = multiply
    for steps, accumulates in itertools.product((16, 32, 80), (False, True)):
        a = whole_range((rows, 4 * steps), first, 0)
        b = whole_range((4 * steps, columns), second, 1)
        groups = a.unflatten(1, (steps // GROUP, 4 * GROUP)).transpose(0, 1).contiguous()
        fours = torch.zeros(steps, columns + 3, 4, dtype=second)
        fours[:, :columns] = b.unflatten(0, (steps, 4)).transpose(1, 2)
        room = torch.full((rows + 2, columns + 6), GUARD, dtype=torch.int32)
        c = room[1:-1, 3:-3]
        before = whole_range(c.shape, torch.int8, 2).int() * accumulates
        c.copy_(before)
        kernel(
            *(c.data_ptr(), c.stride(0), groups.data_ptr(), GROUP, rows * GROUP),
            *(fours.data_ptr(), columns + 3, rows, columns, steps, accumulates),
        )
        assert c.equal((a.long() @ b.long() + before).int())
        c.fill_(GUARD)
        assert (room == GUARD).all(), "something was written outside of c"
