"""The functions of the flash_attn package (2.8) on foo's kernels, for the CPU and device foo.

    >>> from foo_ops.integrations.flash_attn import flash_attn_func
    >>> query, key, value = torch.randn(3, 2, 9, 4, 32).unbind()
    >>> flash_attn_func(query, key, value, causal=True, window_size=(4, 0)).shape
    torch.Size([2, 9, 4, 32])

`install` puts them where ``import flash_attn`` finds them. Every option does what it does there, or
is refused. Beyond that float32 and float64 are taken, and values with a head dimension of their
own. The logsumexp of a query that sees no key is -inf, where flash_attn gives inf. Errors that come
from foo's operators speak of query, key and value.
"""

from foo_ops.integrations.flash_attn.cache import flash_attn_with_kvcache
from foo_ops.integrations.flash_attn.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
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
