"""Run the kernels of users as interpreted Python, with the same results (FOO_INTERPRET=1)."""
