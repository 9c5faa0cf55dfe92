"""Define operators and register their kernels: torch.library, extended to Numba kernels.

The names of torch.library are here, with its semantics; most are torch's own objects. Extensions:

- `register_kernel`, `impl` and `Library.impl` take an `elementwise_kernel` or a `tile_kernel` as
  well as a function. The C++ dispatcher calls it through its address, without Python. `numba_op`
  makes an operator from one function.
- `define`: an operator can be defined again, as in a notebook; its registrations end with it.
- `register_autograd`: a call without gradients enters no Python, and neither does one whose
  gradients an operator computes; torch.func differentiates both. `register_variant_autograd` does
  the same for ``f_`` and ``f.out``.
- `register_autocast`: keyword arguments, and autocast's own dtype.
- `register_vmap`: replaces the rule of a Numba kernel; `register_vmap_rows` maps in one call, and
  `register_vmap_loop` by a loop over the mapped dimension.
- `register_nested_rows`: jagged nested tensors for operators of rows; others refuse them.
- `register_sharding`: how operators on DTensors are sharded; kernels of elements and rows have a
  rule.
- `register_flops`: for torch.utils.flop_counter.
- `holds` and `have_sizes`: conditions in fake kernels on sizes that may depend on data.
- `opcheck`: takes device foo, too, and checks that gradients are recorded. `check_bounds` checks
  that no kernel reads or writes outside of a tensor.

Example:
    >>> @foo_ops.library.numba_op("mylib::relu6")
    ... def relu6(x: float) -> float:
    ...     return min(max(x, 0.0), 6.0)
    >>> torch.ops.mylib.relu6(torch.tensor([-1.0, 2.0, 8.0]))
    tensor([0., 2., 6.])
"""

from torch.library import fallthrough_kernel, get_ctx, infer_schema, wrap_triton

from foo_ops._process import after_import
from foo_ops.library.autograd import register_autograd
from foo_ops.library.checks import OPCHECKS, opcheck
from foo_ops.library.elementwise import (
    ElementwiseKernel,
    elementwise_kernel,
    register_variant_autograd,
)
from foo_ops.library.kernels import (
    Library,
    Scratch,
    check_bounds,
    custom_op,
    define,
    get_kernel,
    impl,
    impl_abstract,
    register_fake,
    register_kernel,
    register_torch_dispatch,
    scratch,
    triton_op,
)
from foo_ops.library.numba_op import numba_op
from foo_ops.library.operators import have_sizes, holds
from foo_ops.library.rules import (
    register_autocast,
    register_flops,
    register_nested_rows,
    register_sharding,
    register_vmap,
    register_vmap_loop,
    register_vmap_rows,
    vmap_by_loop,
)
from foo_ops.library.tiles import TileKernel, tile_kernel


def _let_dtensor_know() -> None:
    import foo_ops.library.dtensor  # noqa: F401


# Its import takes a second.
after_import("torch.distributed.tensor", _let_dtensor_know)

__all__ = [
    "OPCHECKS",
    "ElementwiseKernel",
    "Library",
    "Scratch",
    "TileKernel",
    "check_bounds",
    "custom_op",
    "define",
    "elementwise_kernel",
    "fallthrough_kernel",
    "get_ctx",
    "get_kernel",
    "have_sizes",
    "holds",
    "impl",
    "impl_abstract",
    "infer_schema",
    "numba_op",
    "opcheck",
    "register_autocast",
    "register_autograd",
    "register_fake",
    "register_flops",
    "register_kernel",
    "register_nested_rows",
    "register_sharding",
    "register_torch_dispatch",
    "register_variant_autograd",
    "register_vmap",
    "register_vmap_loop",
    "register_vmap_rows",
    "scratch",
    "tile_kernel",
    "triton_op",
    "vmap_by_loop",
    "wrap_triton",
]
