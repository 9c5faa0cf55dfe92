"""Run users' kernels as interpreted Python, with the same results (FOO_INTERPRET=1)."""
