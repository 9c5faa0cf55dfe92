"""Writes figures of a results file into README.md, docs/index.md and docs/performance.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import flex, report
from benchmarks.first_call import REPOSITORY
from benchmarks.measure import Result
from benchmarks.pages import replace_between_marks
from benchmarks.plots import save_plots
from benchmarks.results_file import Content
from benchmarks.targets import against_peer, best_peer, speedups

FIGURES = "figures"
"""The name of the marks."""
README = REPOSITORY / "README.md"
INDEX = REPOSITORY / "docs" / "index.md"
PERFORMANCE = REPOSITORY / "docs" / "performance.md"
GALLERY = REPOSITORY / "docs" / "flex_attention.md"
IMAGES = REPOSITORY / "docs" / "images"
GALLERY_SECTION = "flex gallery"
FRONT_PLOT = "attention_speed_64.png"
# The rows of the front page: a table of the benchmark for each kind of work.
KINDS = {
    "attention": "attention forward",
    "its gradients": "attention backward",
    "attention with a bias, dropout, a window, packed sequences": "attention options",
    "attention of one new token": "attention decoding",
    "norms, rotary embedding, SwiGLU, loss": "operators",
    "linear layers": "linear",
    "linear layers of 1 and 4 rows": "linear of few rows",
    "linear layers of 8 and 4 bits": "quantized linear",
    "linear layers of 8 and 4 bits, 1 and 4 rows": "quantized linear of one row",
    "the kit's tutorial": "kit",
    "examples of the kit": "examples",
}
MOST_NAMES = 3


@dataclass(frozen=True)
class Published:
    """The files that figures are written to; tests choose others."""

    readme: Path = README
    performance: Path = PERFORMANCE
    images: Path = IMAGES
    gallery: Path = GALLERY
    index: Path = INDEX


def publish(content: Content, places: Published, sections: Sequence[str]) -> list[Path]:
    """Write the figures into the pages, between marks, and return these.

    README and the manual's first page get the summary, and the manual the headline rows with plots,
    if these are all sections; the gallery gets the speed of its variants.
    """
    pages = []
    if GALLERY_SECTION in sections:
        replace_between_marks(places.gallery, FIGURES, gallery_speeds(content))
        pages.append(places.gallery)
    if set(sections) != set(report.SECTIONS):
        return pages
    plots = save_plots(content, places.images)
    folder = places.images.name
    images = {f"{folder}/{name}": description for name, description in plots.items()}
    replace_between_marks(places.performance, FIGURES, tables(content, images))
    for page, images_folder in ((places.readme, f"docs/{folder}"), (places.index, folder)):
        name = f"{images_folder}/{FRONT_PLOT}"
        front = {name: plots[FRONT_PLOT]} if FRONT_PLOT in plots else {}
        replace_between_marks(page, FIGURES, front_page(content, front))
    return [*pages, places.performance, places.readme, places.index]


def gallery_speeds(content: Content) -> str:
    """Describe the speed of the variants, relative to dense attention."""
    results = content.by_section()[GALLERY_SECTION]
    rows = report.gallery_table(results, flex.DENSE)
    size = ", ".join(results[0].name.split(", ")[3:5])
    what = (
        f"One thread, {size} (heads x head dimension, length). In brackets: how many times as fast "
        "as attention that sees all keys and does nothing with the scores."
    )
    return "\n\n".join([markdown_table(rows), what, f"Measured on: {report.caption(content)}"])


def tables(content: Content, images: dict[str, str]) -> str:
    """Return the headline rows as short Markdown tables, with plots: descriptions by path."""
    parts = []
    for name, results in content.by_section(headline=True).items():
        section = report.SECTIONS[name]
        if results[0].workload is None:
            rows = report.table_of(content, name, results)
        else:
            rows = report.digest_table(content, results, section.unit)
        parts.append(f"**{section.title}**\n\n{markdown_table(rows)}")
    texts = (content.one_core, report.tally(content), report.LEGEND, report.caption(content))
    return "\n\n".join([*parts, *plots_of(images), *filter(None, texts)])


def front_page(content: Content, images: dict[str, str]) -> str:
    """Return a row for each kind of work, one plot, and the machine."""
    texts = (content.one_core, f"Measured on: {report.caption(content)}")
    return "\n\n".join([markdown_table(summary(content)), *plots_of(images), *filter(None, texts)])


def summary(content: Content) -> list[list[str]]:
    """Compare each kind of work with its best peers, and name the rows where one is faster."""
    rows = [["kind of work", "rows", "times the best peer", "least to most", "a peer is faster in"]]
    for kind, section in KINDS.items():
        compared = [
            it for it in content.results if it.section == section and is_compared(content, it)
        ]
        if not compared:
            continue
        times = [times_the_best_peer(result) for result in compared]
        rows.append(
            [
                kind,
                str(len(compared)),
                f"{statistics.median(times):.2f}",
                f"{min(times):.2f} to {max(times):.2f}",
                in_short([it for it in compared if "slower" in against_peer(it)]),
            ]
        )
    return rows


def is_compared(content: Content, result: Result) -> bool:
    return content.is_judged(result) and best_peer(result) is not None


def times_the_best_peer(result: Result) -> float:
    peer = best_peer(result)
    assert peer is not None
    return statistics.median(speedups(result, peer))


def in_short(results: Sequence[Result]) -> str:
    """Name the first rows, and count the others."""
    if not results:
        return "none"
    names = [f"{it.name} ({report.threads_text(it.threads)})" for it in results]
    others = f", and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{'; '.join(names[:MOST_NAMES])}{others}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    header, *others = rows
    texts = ("case", "variant", "verdict", "kind of work", "a peer is faster in")
    alignment = ["---" if column in texts else "---:" for column in header]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, alignment, *others))


def plots_of(images: dict[str, str]) -> list[str]:
    return [f"![{description}]({path})" for path, description in images.items()]
