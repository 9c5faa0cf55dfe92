"""Find the bugs of accelerators without one: a sanitizer of device ``foo``.

Every operator on foo is done when it returns, so that code that is wrong on a GPU passes. The
sanitizer keeps the order that streams, events and synchronizations give, as vector clocks, and
finds accesses that have none: in every run, and not only in that where the race is lost.

Example:
    >>> from foo_ops import sanitizer
    >>> stream = torch.foo.Stream()
    >>> with sanitizer.check() as findings:
    ...     x = torch.ones(4, device="foo")
    ...     with torch.foo.stream(stream):
    ...         y = x + 1
    >>> [finding.kind for finding in findings]
    ['race']
"""

from foo_ops.sanitizer._control import Action, check, disable, enable, is_enabled
from foo_ops.sanitizer.findings import Access, Finding, Frame, SanitizerError, SanitizerWarning

__all__ = [
    "Access",
    "Action",
    "Finding",
    "Frame",
    "SanitizerError",
    "SanitizerWarning",
    "check",
    "disable",
    "enable",
    "is_enabled",
]
