"""The pytest plugin of foo_ops: one test for each check of each operator.

Every run of pytest in an environment with foo_ops imports this file. So it is installed as a
package of its own, ``pytest_foo_ops`` (see setup.py), and torch is imported only where a test asks
for ``operator_check``.
"""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "operators(*specs): the foo_ops.testing.OpSpec whose checks the argument operator_check "
        "stands for, one at a time",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "operator_check" not in metafunc.fixturenames:
        return
    markers = metafunc.definition.iter_markers("operators")
    specs = [spec for marker in markers for spec in marker.args]
    if not specs:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid} asks for operator_check: say of which operators, with "
            "@pytest.mark.operators(spec, ...)"
        )
    from foo_ops.testing import cases

    parameters = [pytest.param(case, id=case.id) for spec in specs for case in cases(spec)]
    metafunc.parametrize("operator_check", parameters)
