"""Rows between the products of a mixture of experts: gates, their gradients, and weighted sums.

The products themselves are those of linear layers (foo_ops/kernels/linear), one for each expert,
which a launcher runs in one parallel loop.
"""
