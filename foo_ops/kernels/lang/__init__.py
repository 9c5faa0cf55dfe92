"""The language of kernels: arguments, views and their elements, sums of rows, scratch memory.

Also random numbers, products of matrices (`dot`), and the meaning of Python's operators and
``math`` in a kernel. `foo_ops.kernels.simd` has explicit vectors and memory accesses.
"""

# A kernel may divide integers or call math.exp without importing a name of that module.
from foo_ops.kernels.math import python_names  # noqa: F401
