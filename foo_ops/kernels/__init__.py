"""Numba kernels. They know pointers, sizes and strides, never a tensor."""
