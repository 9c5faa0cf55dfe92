"""Define operators and register their kernels: torch.library, extended to kernels of Numba.

``define``, ``register_fake`` and ``opcheck`` are torch.library's names with its semantics; opcheck
also works on foo. A kernel registered here is called by the C++ dispatcher through its address,
with no Python on the way.

Example:
    >>> import torch
    >>> import foo_ops
    >>> torch.ops.foo.abs(torch.tensor([-1.0, 2.0]))
    tensor([1., 2.])
"""

from torch.library import define, register_fake, register_vmap

from foo_ops.library.autocast import register_autocast
from foo_ops.library.autograd import register_autograd, register_variant_autograd
from foo_ops.library.checks import OPCHECKS, opcheck
from foo_ops.library.elementwise import ElementwiseKernel, elementwise_kernel
from foo_ops.library.flops import register_flops
from foo_ops.library.kernels import register_kernel
from foo_ops.library.tiles import TileKernel, tile_kernel
from foo_ops.library.vmap import register_vmap_loop, vmap_by_loop

__all__ = [
    "OPCHECKS",
    "ElementwiseKernel",
    "TileKernel",
    "define",
    "elementwise_kernel",
    "opcheck",
    "register_autocast",
    "register_autograd",
    "register_fake",
    "register_flops",
    "register_kernel",
    "register_variant_autograd",
    "register_vmap",
    "register_vmap_loop",
    "tile_kernel",
    "vmap_by_loop",
]
