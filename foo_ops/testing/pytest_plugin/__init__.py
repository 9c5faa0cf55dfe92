"""The pytest plugin of foo_ops: one test for each check of each operator.

Every run of pytest in an environment with foo_ops imports this file. So it is installed as a
package of its own, ``pytest_foo_ops`` (see setup.py), and imports torch only if a test uses
``operator_check``.
"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from foo_ops.testing import Case

# Standard error, before pytest captures it for each test.
_stderr = pytest.StashKey[int]()
# Name of the report's property that holds the operator.
_OPERATOR = "foo_ops operator"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("foo_ops")
    group.addoption(
        "--foo-sanitizer",
        action="store_true",
        help="run each test under foo_ops.sanitizer, and fail tests with findings",
    )
    group.addoption(
        "--foo-quick",
        action="store_true",
        help="run only the third of an operator's checks that finds most",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)
    config.addinivalue_line(
        "markers",
        "operators(*specs, checks=None, quick=None): run the test once for each check of these "
        "foo_ops.testing.OpSpec, as its argument operator_check: for all checks or those named; "
        "quick=True keeps the third that finds most, and None follows --foo-quick",
    )
    config.addinivalue_line(
        "markers",
        "foo_sanitizer(enabled=True): run the test under foo_ops.sanitizer; False turns the "
        "sanitizer off for the test, also with --foo-sanitizer",
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


def _is_sanitized(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("foo_sanitizer")
    if marker is None:
        return bool(item.config.getoption("--foo-sanitizer"))
    return bool(marker.args[0] if marker.args else marker.kwargs.get("enabled", True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if not _is_sanitized(item):
        return (yield)
    from foo_ops import sanitizer
    from foo_ops.sanitizer.findings import last_words_to

    with last_words_to(item.config.stash[_stderr]), sanitizer.check() as findings:
        result = yield
    if findings:
        pytest.fail("\n\n".join(map(str, findings)), pytrace=False)
    return result


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "operator_check" not in metafunc.fixturenames:
        return
    markers = list(metafunc.definition.iter_markers("operators"))
    if not any(marker.args for marker in markers):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: a test with operator_check must name operators with "
            "@pytest.mark.operators(spec, ...)"
        )
    parameters = [
        pytest.param(case, id=case.id) for marker in markers for case in _cases(metafunc, marker)
    ]
    metafunc.parametrize("operator_check", parameters)


def _cases(metafunc: pytest.Metafunc, marker: pytest.Mark) -> Iterator[Case]:
    """List the cases of a marker, or raise a UsageError."""
    from foo_ops.testing import OpSpec, cases

    test = metafunc.definition.nodeid
    for name in marker.kwargs:
        if name not in ("checks", "quick"):
            raise pytest.UsageError(
                f"{test}: @pytest.mark.operators takes specs, checks= and quick=, got {name}="
            )
    quick = marker.kwargs.get("quick")
    if quick is None:
        quick = metafunc.config.getoption("--foo-quick")
    for spec in marker.args:
        if not isinstance(spec, OpSpec):
            raise pytest.UsageError(
                f"{test}: @pytest.mark.operators must be given foo_ops.testing.OpSpec, got {spec!r}"
            )
        try:
            yield from cases(spec, marker.kwargs.get("checks"), quick=quick)
        except ValueError as error:
            raise pytest.UsageError(f"{test}: {error}") from None


def pytest_itemcollected(item: pytest.Item) -> None:
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "operator_check" in callspec.params:
        item.user_properties.append((_OPERATOR, callspec.params["operator_check"].spec.name))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With --durations, show the total time of each operator's checks."""
    count = terminalreporter.config.getoption("durations")
    seconds: dict[str, float] = collections.defaultdict(float)
    checks: collections.Counter[str] = collections.Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        properties = dict(getattr(report, "user_properties", ()))
        if isinstance(report, pytest.TestReport) and _OPERATOR in properties:
            operator = str(properties[_OPERATOR])
            seconds[operator] += report.duration
            checks[operator] += report.when == "call"
    if count is None or not seconds:
        return
    terminalreporter.section(f"slowest {count or len(seconds)} operators")
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)
    for name in slowest[: count or None]:
        terminalreporter.write_line(f"{seconds[name]:.2f}s {name} ({checks[name]} checks)")
