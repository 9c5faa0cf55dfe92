"""Loads foo_ops at the end of torch's own import: the entry point of the group ``torch.backends``.

It is installed as a package of its own, ``torch_foo_ops`` (see setup.py), so that foo_ops may be in
the middle of its import, which imports torch and then goes on, and so that a torch which foo_ops
was not built for can be used without it.
"""

import warnings


def autoload() -> None:
    """Load foo_ops, or say why it is left out."""
    try:
        import foo_ops  # noqa: F401
    except ImportError as error:
        warnings.warn(f"device foo is not available: {error}", stacklevel=2)
