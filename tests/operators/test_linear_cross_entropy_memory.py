"""foo::linear_cross_entropy: kernels write only to their own scratch memory."""

import pytest
from support.parts import whole
from support.processes import run

# Calls each kernel with fences between the regions of its scratch memory, and checks them.
FENCED = """
import ctypes, struct, sys
import numpy as np
import torch
from foo_ops.kernels.lang import scratch
scratch.FENCE = 1024
from foo_ops.kernels.compiler.resolve import resolve
from foo_ops.kernels.linear.cross_entropy import argument_types, gradient_dtype, make_scratch
from foo_ops.kernels.simd.types import compute_dtype

dtype, compute = sys.argv[1], compute_dtype(sys.argv[1])
number, pointer = ctypes.c_int64, ctypes.c_void_p
fields = argument_types(dtype)[0].fields
sums, own = getattr(torch, compute), getattr(torch, dtype)
wide = getattr(torch, gradient_dtype(dtype))

def parameters(**given):
    values = [given.pop(name, 0) for name in fields]
    assert not given
    bits = [
        struct.unpack("q", struct.pack("d", it))[0] if isinstance(it, float)
        else it.data_ptr() if isinstance(it, torch.Tensor) else it
        for it in values
    ]
    return (number * len(bits))(*bits)

for rows, columns, depth in ((1, 70, 515), (5, 130, 33), (239, 65, 1030), (33, 256, 1)):
    hidden, weight = torch.randn(rows, depth).to(own), torch.randn(columns, depth).to(own)
    bias, target = torch.randn(columns).to(own), torch.full((rows,), columns - 1)
    largest, total, logit_sum, loss = torch.zeros(4, rows, dtype=sums).unbind()
    logsumexp, grad_logits = torch.full((rows,), 9, dtype=sums), torch.zeros(rows, columns).to(wide)
    apart = torch.nn.functional.pad(hidden.t(), (0, 1))[:, :rows].t()
    # Which regions are used depends on how matrices lie in memory.
    given = [
        parameters(
            rows=rows, columns=columns, depth=depth, has_bias=1, ignore_index=-100,
            split_columns=256, softcap=2.0, softcap_inverse=0.5, label_smoothing=0.1,
            grad_mean_share=1.0, left=lies, left_row_stride=lies.stride(0),
            left_step_stride=lies.stride(1), right=weight, right_column_stride=depth,
            right_step_stride=1, bias=bias, bias_column_stride=1, target=target, largest=largest,
            total=total, logit_sum=logit_sum, loss=loss, logsumexp=logsumexp,
            grad_logits=grad_logits, grad_logits_row_stride=columns,
        )
        for lies in (hidden, apart)
    ]
    for kernel in ("cross_entropy_statistics", "cross_entropy_gradient"):
        function = ctypes.CFUNCTYPE(None, *[pointer] * 4)(resolve(kernel, dtype))
        block, size = (number * 4)(0, rows, 0, columns), number(0)
        function(given[0], block, None, ctypes.addressof(size))
        memory = np.full(size.value // np.dtype(compute).itemsize, -12345.0, dtype=compute)
        for arguments in given:
            function(arguments, block, memory.ctypes.data, None)
        # Each region was written to, at least in part. What is left between them is the fences.
        untouched = np.concatenate(([0], memory == -12345.0, [0])).astype(np.int8)
        begins, ends = (np.flatnonzero(np.diff(untouched) == step) for step in (1, -1))
        describe = make_scratch(dtype).describe
        regions = describe(*[1] * describe.__code__.co_argcount)
        whole = np.count_nonzero(ends - begins >= scratch.FENCE)
        assert whole == len(regions) + 1, (kernel, rows, columns, depth, whole, len(regions))
    # The cap leaves nothing of the gradients of large logits.
    assert (total > 0).all() and grad_logits.any(-1).all()
"""


@pytest.mark.parametrize("dtype", ["float32", *whole("bfloat16", "float64", "float16")])
def test_kernels_stay_inside_of_their_regions(dtype, tmp_path):
    run(FENCED, tmp_path, dtype)
