"""A target of Numba for kernels, with leaner steps than those of its own target for processors."""
