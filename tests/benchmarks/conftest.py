from support.extras import pytest_pycollect_makemodule  # noqa: F401
