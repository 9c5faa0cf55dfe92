"""The functions of the flash_attn package (2.8) on foo's kernels, for the CPU and device foo.

    >>> from foo_ops.integrations.flash_attn import flash_attn_func
    >>> query, key, value = torch.randn(3, 2, 9, 4, 32).unbind()
    >>> flash_attn_func(query, key, value, causal=True, window_size=(4, 0)).shape
    torch.Size([2, 9, 4, 32])

`install` makes ``import flash_attn`` find them. Every option works as in flash_attn, or is refused.
In addition, float32 and float64 are supported, and values with another head_dim than the keys. The
logsumexp of a query that sees no key is -inf, where flash_attn gives inf. Errors from foo's
operators name query, key and value.
"""

from foo_ops.integrations.flash_attn.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from foo_ops.integrations.flash_attn.stand_in import install, uninstall

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
