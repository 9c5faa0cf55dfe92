"""Numba kernels. They know pointers, sizes and strides, never a tensor."""

# The first of all modules here, to know of each one whether it was imported as it is on disk.
from foo_ops.kernels.compiler import sources  # noqa: F401, I001

# The kernels that the resolver finds by their names.
from foo_ops.kernels import table  # noqa: F401
