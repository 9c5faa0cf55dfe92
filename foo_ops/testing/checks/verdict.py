"""Report at once what fails of all that is checked."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from foo_ops.testing.checks.matrix import Case, cases
from foo_ops.testing.spec import OpSpec


class OperatorCheckError(AssertionError):
    """An operator fails some of its checks.

    Attributes:
        failures: the cases that failed, each with its error.
    """

    def __init__(
        self, spec: OpSpec, count: int, failures: Sequence[tuple[Case, Exception]]
    ) -> None:
        self.failures = failures
        lines = [f"{spec.name} fails {len(failures)} of {count} cases"]
        of_checks: dict[str, list[tuple[Case, Exception]]] = {}
        for failure in failures:
            of_checks.setdefault(failure[0].check, []).append(failure)
        for check, ((case, error), *others) in of_checks.items():
            lines.append(f"\n{case.id}: {error}")
            if others:
                lines.append(f"{len(others)} more cases of {check}: {listed(others)}")
        super().__init__("\n".join(lines))


def listed(failures: Sequence[tuple[Case, Exception]]) -> str:
    """List the first ten."""
    names = [case.id for case, _ in failures[:10]]
    return ", ".join(names + ["..."] * (len(failures) > len(names)))


def check_operator(
    spec: OpSpec, *, checks: Collection[str] | None = None, quick: bool = False
) -> None:
    """Run everything that an operator has to pass, and report all that fails at once.

    Args:
        spec: the operator, with samples and a reference.
        checks: the names of some checks, of those in ``CHECKS``; without it all of them run.
        quick: only the third of the cases that finds most, see `cases`.

    Raises:
        OperatorCheckError: an AssertionError that says what is wrong; of each check one failure is
            spelled out, and the others are named.

    Example:
        >>> from foo_ops.testing import ABS
        >>> check_operator(ABS, checks=["gradcheck", "opcheck"])
    """
    failures: list[tuple[Case, Exception]] = []
    chosen = cases(spec, checks, quick=quick)
    for case in chosen:
        try:
            case()
        except Exception as error:
            failures.append((case, error))
    if failures:
        raise OperatorCheckError(spec, len(chosen), failures)
