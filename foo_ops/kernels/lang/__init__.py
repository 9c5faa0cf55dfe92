"""What kernels are written in: arguments, views and their elements, sums of rows, scratch memory.

Also random numbers, products of matrices (`dot`), and what Python's own operators and ``math``
mean in a kernel. Explicit vectors and memory are those of `foo_ops.kernels.simd`.
"""

# A kernel may divide integers or call math.exp without a name from there.
from foo_ops.kernels.math import python_names  # noqa: F401
