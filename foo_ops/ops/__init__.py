"""Operators of ``torch.ops.foo``: one file each, which registers the operator at its import."""

from foo_ops.ops.abs import abs
from foo_ops.ops.attention import attention
from foo_ops.ops.attention_varlen import attention_varlen

__all__ = ["abs", "attention", "attention_varlen"]
