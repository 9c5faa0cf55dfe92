"""Load the compiled companion, the device and the operators.

The companion must have been built for the installed torch, and no other backend may have its place.

This module imports torch only inside its functions, so that ``import foo_ops`` and ``import torch``
work in either order.
"""

from foo_ops._process import after_import

is_loaded = False


def autoload() -> None:
    """Load the compiled companion, register the device, declare the operators. Idempotent."""
    global is_loaded
    check_torch()
    check_place()
    import foo_ops._C
    import foo_ops.device  # noqa: F401
    from foo_ops import _operators, _process, flash_attention_of_cpu  # noqa: F401
    from foo_ops._process import switch
    from foo_ops.compat import CONTEXT_PARALLEL

    if not is_loaded:
        _operators.declare()
        flash_attention_of_cpu.register()
        after_import(CONTEXT_PARALLEL, install_context_parallel)
        if switch("FOO_SANITIZER"):
            from foo_ops import sanitizer

            sanitizer.enable()
    is_loaded = True


def check_torch() -> None:
    """Raise an ImportError if the companion was built for another torch.

    It might end the process.
    """
    import torch

    try:
        from foo_ops._built_for import TORCH
    except ModuleNotFoundError:
        raise ImportError("foo_ops is not built: run `make setup` in its checkout") from None
    installed = ".".join(torch.__version__.split(".")[:2])
    if installed != TORCH:
        raise ImportError(
            f"foo_ops was built for torch {TORCH}, but torch {torch.__version__} is installed: "
            f"install torch {TORCH}, or a foo_ops for torch {installed}"
        )


def check_place() -> None:
    """Raise an ImportError if another package is the backend of the key PrivateUse1.

    The companion would register kernels beside those of that package.
    """
    from foo_ops.compat import get_privateuse1_backend_name

    name = get_privateuse1_backend_name()
    if name not in ("privateuseone", "foo"):
        raise ImportError(
            f"torch has room for one out-of-tree backend (PrivateUse1), and {name} already uses it"
        )


def install_context_parallel() -> None:
    from foo_ops.distributed import context_parallel

    context_parallel.install()
