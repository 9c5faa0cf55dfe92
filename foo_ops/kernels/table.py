"""The table of the package's kernels: the name that a launcher asks for, and what makes it.

Light: no Numba, no LLVM. A module of kernels is imported when one of them is compiled.
"""

from __future__ import annotations

from foo_ops.kernels.compiler.kernel import KERNELS, Maker, OwnKernel

# These make the kernels of the kit from a user's functions.
ELEMENTWISE = Maker("foo_ops.kernels.user.elementwise", "make_elementwise_kernel")
TILE = Maker("foo_ops.kernels.user.tile", "make_tile_kernel")

FORWARD = Maker("foo_ops.kernels.attention.forward", "make_forward_kernel")
DECODE = Maker("foo_ops.kernels.attention.decode", "make_decode_kernel")
MERGE = Maker("foo_ops.kernels.attention.merge", "make_merge_kernel")
BACKWARD = Maker("foo_ops.kernels.attention.backward", "make_backward_kernel")
PRODUCT = Maker("foo_ops.kernels.linear.product", "make_product_kernel")
FEW_ROWS = Maker("foo_ops.kernels.linear.few_rows", "make_few_rows_kernel")
SUM_CHUNKS = Maker("foo_ops.kernels.attention.sum_chunks", "make_sum_chunks_kernel")
DROPOUT_MASK = Maker("foo_ops.kernels.attention.dropout_mask", "make_dropout_mask_kernel")

# A plain kernel leaves out the options that most calls do without: bias, soft cap, ALiBi and
# dropout. It is compiled in half the time.
_PLAIN = {"has_options": False}
_OWN = (
    OwnKernel("attention_forward", FORWARD),
    OwnKernel("attention_forward.plain", FORWARD, _PLAIN),
    OwnKernel("attention_decode", DECODE),
    OwnKernel("attention_decode.plain", DECODE, _PLAIN),
    OwnKernel("attention_merge", MERGE),
    OwnKernel("attention_backward", BACKWARD),
    OwnKernel("attention_backward.plain", BACKWARD, _PLAIN),
    OwnKernel("attention_sum_chunks", SUM_CHUNKS),
    OwnKernel("attention_dropout_mask", DROPOUT_MASK),
    OwnKernel("linear_product", PRODUCT),
    OwnKernel("linear_few_rows", FEW_ROWS),
)
KERNELS.update({kernel.name: kernel for kernel in _OWN})
