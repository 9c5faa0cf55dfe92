"""Operators of ``torch.ops.foo``: one file each."""
