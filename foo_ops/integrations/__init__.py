"""foo_ops in other libraries, one module each, not imported by ``import foo_ops``."""
