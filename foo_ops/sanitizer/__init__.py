"""A sanitizer for device ``foo``: finds bugs of accelerator programs without an accelerator.

Operators on foo finish before they return, so code that is wrong on a GPU passes. The sanitizer
tracks the order given by streams, events and synchronizations, as vector clocks, and finds
unordered accesses: in every run, not only when a race is lost.

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

from foo_ops.sanitizer.findings import (
    Access,
    Action,
    Finding,
    Frame,
    SanitizerError,
    SanitizerWarning,
    check,
    disable,
    enable,
    is_enabled,
)

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
