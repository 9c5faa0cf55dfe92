"""Products of pairs of int16, by one instruction or by several."""

import pytest
import torch

from foo_ops.kernels.products.on_vectors import make_matmul
from foo_ops.kernels.simd import narrow
from foo_ops.kernels.simd.memory import pointer_to
from foo_ops.kernels.simd.types import lanes_of


@pytest.mark.parametrize("has_dot", [None, False])
def test_all_signs_and_sizes(compiled, monkeypatch, has_dot):
    """Sums wrap around in 32 bits."""
    if has_dot is False:
        monkeypatch.setattr(narrow, "has_integer_dot", lambda lanes: False)
    # A cached function would have its instructions already.
    matmul = make_matmul.__wrapped__("int32", "int16x2", "int16x2")
    sums, units = pointer_to("int32"), pointer_to("int16x2")

    def kernel(c, a, b, rows, columns, steps):
        matmul(sums(c), columns, units(a), steps, 1, units(b), columns, rows, columns, steps, False)

    rows, columns, steps = 9, 7 * lanes_of("int32"), 5
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
        for shape in ((rows, 2 * steps), (2 * steps, columns))
    )
    a[0], b[:, 0], a[1], b[:, 1] = -(2**15), -(2**15), 2**15 - 1, -1
    c = torch.zeros(rows, columns, dtype=torch.int32)
    joined = b.unflatten(0, (steps, 2)).transpose(1, 2).contiguous()
    compiled(kernel)(c.data_ptr(), a.data_ptr(), joined.data_ptr(), rows, columns, steps)
    assert c.equal((a.long() @ b.long()).int())
