"""Kernels that are made from a user's function: a loop over elements, or over tiles."""
