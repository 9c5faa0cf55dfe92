"""Fast CPU operators with kernels in Python, the device ``foo``, and the kit to write more."""

# At its end torch calls the entry point (_entry_point), which finds this import under way.
import torch  # noqa: F401

from foo_ops._autoload import autoload

autoload()

from foo_ops import ops  # noqa: E402
from foo_ops.ops import *  # noqa: E402, F403

__all__ = ops.__all__
__version__ = "0.2.0"
