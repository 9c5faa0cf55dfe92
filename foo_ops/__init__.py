"""Fast CPU operators with kernels in Python, the device ``foo``, and the kit to write more."""

# Importing torch runs the entry point that loads the operators and the device (_autoload.py).
import torch  # noqa: F401

from foo_ops._autoload import autoload

autoload()

from foo_ops.ops.abs import abs  # noqa: E402
from foo_ops.ops.attention import attention  # noqa: E402
from foo_ops.ops.attention_varlen import attention_varlen  # noqa: E402

__all__ = ["abs", "attention", "attention_varlen"]
__version__ = "0.1.0"
