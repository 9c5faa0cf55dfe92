"""foo_ops in other libraries, one module each; none is imported by ``import foo_ops``."""
