"""A Numba target for kernels, with fewer and leaner passes than Numba's CPU target."""
