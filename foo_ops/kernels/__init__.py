"""Numba kernels. They know pointers, sizes and strides, never a tensor."""

# Imported first: it records the state of all source files, to notice when they change on disk.
from foo_ops.kernels.compiler import sources  # noqa: F401, I001

# Registers the kernels that the resolver finds by name.
from foo_ops.kernels import table  # noqa: F401
