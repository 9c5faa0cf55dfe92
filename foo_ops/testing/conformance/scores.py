"""Keep outcomes in a file, and show them: a table of suites, and failures by cause."""

import collections
import json
import re
from collections.abc import Mapping
from pathlib import Path

from foo_ops.testing.conformance.processes import Case, Outcome

KINDS = ("passed", "failed", "cannot")

# The first pattern that matches a message gives its cause.
CAUSES = (
    ("the process ended with -9", "took too long, or memory ran out"),
    ("the process ended with", "crashed"),
    ("NotImplementedError|Could not run|not implemented for", "is not implemented"),
    ("only the cpu raises", "takes what the CPU refuses"),
    ("raises ", "raises an error"),
    ("may be on the CPU|tensor \\d+: ", "tensors of two devices are not refused"),
    ("layout .*, announced", "torch.compile expects another layout"),
    ("draws from the CPU's generator", "draws from the generator of the CPU"),
    ("not close|not equal", "other values"),
    (
        "dtype|layout|requires_grad|shape|strides|number of results|result on",
        "other kind of result",
    ),
)


def cause_of(message: str) -> str:
    return next((cause for pattern, cause in CAUSES if re.search(pattern, message)), "other")


def read_scores(path: Path, device: str, version: str) -> dict[Case, Outcome]:
    """Return the outcomes of an earlier run, if there was one."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    for what, now in (("device", device), ("torch", version)):
        if kept[what] != now:
            raise ValueError(
                f"conformance: {path} must be of {what} {now} to be resumed, got {kept[what]}"
            )
    return {tuple(name.split("/")): message for name, message in kept["cases"].items()}


def write_scores(path: Path, device: str, version: str, outcomes: Mapping[Case, Outcome]) -> None:
    cases = {"/".join(case): message for case, message in sorted(outcomes.items())}
    text = json.dumps({"device": device, "torch": version, "cases": cases}, indent=1)
    # Replaced at once: an interrupted run leaves the former file.
    new = path.with_name(path.name + ".new")
    new.write_text(text + "\n")
    new.replace(path)


def read_known(path: Path) -> dict[Case, str]:
    """Read lines such as ``operators/erfinv: why it cannot pass``, with a dtype or without."""
    known = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, colon, reason = line.partition(":")
            if not colon or name.count("/") not in (1, 2):
                raise ValueError(
                    f"conformance: {path} must have lines 'suite/name: reason', got {line!r}"
                )
            known[tuple(name.strip().split("/"))] = reason.strip()
    return known


class Report:
    """A summary of outcomes, given the cases that are known not to pass."""

    def __init__(self, outcomes: Mapping[Case, Outcome], known: Mapping[Case, str]) -> None:
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.failed: dict[Case, str] = {}
        self.known: dict[Case, str] = {}
        for case, message in sorted(outcomes.items()):
            reason = known.get(case) or known.get(case[:2])
            kind = "passed"
            if reason is not None:
                self.known[case] = reason
                kind = "failed" if message is None else "cannot"
                message = "passes, but is listed as known" if message is None else message
            elif message is not None:
                kind = "failed"
            if kind == "failed":
                assert message is not None
                self.failed[case] = message
            self.counts[case[0], kind] += 1

    def rows(self) -> list[tuple[str, list[int]]]:
        """Return each suite's number of cases, and how many passed, failed and cannot pass."""
        rows = []
        for suite in dict.fromkeys(suite for suite, _ in self.counts):
            numbers = [self.counts[suite, kind] for kind in KINDS]
            rows.append((suite, [sum(numbers), *numbers]))
        return rows

    def print(self) -> None:
        for case, message in self.failed.items():
            print(f"FAILED {'/'.join(case)}: {' '.join(message.split())[:300]}")
        print(f"\n{'':12} {'cases':>7} " + " ".join(f"{kind:>7}" for kind in KINDS))
        for suite, numbers in self.rows():
            print(f"{suite:12} " + " ".join(f"{number:7}" for number in numbers))
        for case, reason in self.known.items():
            print(f"cannot: {'/'.join(case)}: {reason}")

    def page(self, device: str, version: str) -> str:
        """Return a page of Markdown."""
        lines = [f"# Device {device} with PyTorch {version}", ""]
        lines += ["| suite | cases | passed | failed | cannot |", "|---|---:|---:|---:|---:|"]
        for suite, numbers in self.rows():
            lines.append(f"| {suite} | " + " | ".join(map(str, numbers)) + " |")
        causes: dict[str, list[Case]] = collections.defaultdict(list)
        for case, message in self.failed.items():
            causes[cause_of(message)].append(case)
        if causes:
            lines += ["", "## What fails, by cause", ""]
        for cause, cases in sorted(causes.items(), key=lambda item: -len(item[1])):
            names = sorted({"/".join(case[:2]) for case in cases})
            shown = ", ".join(f"`{name}`" for name in names[:20])
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            lines.append(f"- **{cause}**: {len(cases)} cases of {shown}{more}")
        if self.known:
            lines += ["", "## What cannot pass", ""]
            lines += [f"- `{'/'.join(case)}`: {why}" for case, why in self.known.items()]
        return "\n".join(lines) + "\n"
