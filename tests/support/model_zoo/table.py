"""Write the table of models in docs/transformers.md, from the rows of tests/models.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"
PAGE = Path(__file__).parents[3] / "docs" / "transformers.md"
LONGEST = 90
Row = Mapping[str, Any]


def publish(rows: Sequence[Row], page: Path = PAGE) -> None:
    """Write the table between its marks."""
    before, found_begin, rest = page.read_text().partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"{page} must have the marks {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{report(rows)}\n\n{END}{after}")


def report(rows: Sequence[Row]) -> str:
    """Write the numbers, a table of the models that were made, and a list of the others."""
    types = by_type(rows)
    made = {name: it for name, it in types.items() if any(is_made(row) for row in it)}
    others = {name: it for name, it in types.items() if name not in made}
    return "\n\n".join(
        [
            summary(rows, types, made),
            table(made),
            "Not made, with the reason:",
            "\n".join(f"- `{name}`: {reason_of(it)}" for name, it in others.items()),
        ]
    )


def by_type(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["type"], []).append(row)
    return dict(sorted(found.items()))


def is_made(row: Row) -> bool:
    return row["verdict"] != "not made"


def summary(rows: Sequence[Row], types: Mapping, made: Mapping) -> str:
    classes = [row for row in rows if is_made(row)]
    agree = sum(row["verdict"] == "agrees" for row in classes)
    generated = [row for row in classes if row["checks"].get("generate") == "agrees"]
    return (
        f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}: of "
        f"{len(types)} model types {len(made)} were made, with {len(classes)} classes, of which "
        f"{agree} agree with themselves after `apply`; {len(generated)} of them generate the same "
        "tokens."
    )


def table(made: Mapping[str, Sequence[Row]]) -> str:
    header = ["model type", "classes", "modality", "replaced", "agrees", "left alone"]
    lines = [header, ["---"] * len(header)]
    lines += [line_of(name, [row for row in it if is_made(row)]) for name, it in made.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def line_of(name: str, rows: Sequence[Row]) -> list[str]:
    """Return the cells of a model type; counts are those of its last class, which has a head."""
    last = rows[-1]
    replaced = ", ".join(f"{kind} {count}" for kind, count in last.get("replaced", {}).items())
    wrong = [f"{row['class']}: {row['verdict']}" for row in rows if row["verdict"] != "agrees"]
    left = {why: part.rpartition(".")[2] for part, why in last.get("left alone", {}).items()}
    cells = [
        f"`{name}`",
        ", ".join(row["class"] for row in rows),
        last.get("modality", ""),
        replaced or "nothing",
        "; ".join(wrong) or "yes",
        "; ".join(f"{part}: {why}" for why, part in left.items()),
    ]
    return [it.replace("|", "\\|") for it in cells]


def reason_of(rows: Sequence[Row]) -> str:
    """Return why none of the classes was made, in one line without markup."""
    text = rows[0]["reason"].replace("`", "'").replace("<", "(").replace(">", ")")
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rstrip()} ..."
