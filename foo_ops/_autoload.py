"""Entry point of the group ``torch.backends``: torch calls it at the end of its own import.

This module imports torch only inside its functions, so that ``import foo_ops`` and ``import torch``
work in either order.
"""

from foo_ops._after_import import after_import

CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"
is_loaded = False


def autoload() -> None:
    """Load the compiled companion, register the device and the operators. Idempotent."""
    global is_loaded
    import foo_ops._C
    import foo_ops.device
    import foo_ops.ops  # noqa: F401
    from foo_ops.kernels.compiler.switches import switch

    if not is_loaded:
        after_import(CONTEXT_PARALLEL, install_context_parallel)
        if switch("FOO_SANITIZER"):
            from foo_ops import sanitizer

            sanitizer.enable()
    is_loaded = True


def install_context_parallel() -> None:
    from foo_ops.distributed import context_parallel

    context_parallel.install()
