"""Plots the results: speed over length, and the time of a decoded token over the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import OURS, Result
from benchmarks.peaks import READ
from benchmarks.results_file import Content
from benchmarks.targets import peak_of, target
from benchmarks.workload import Workload

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    OURS: "#d1495b",
    "flash": "#30638e",
    "flex": "#5fa55a",
    "zentorch": "#e69f00",
    "math": "#8d99ae",
}
"""The contenders, in the order of the legend."""
LIMIT = "#444444"
HEAD_DIMS = (64, 128)


def save_plots(content: Content, folder: Path) -> dict[str, str]:
    """Write the PNG files; return a description of each by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptions = {}
    for head_dim in HEAD_DIMS:
        results = [it for it in content.results if is_square(it.workload, head_dim)]
        if results:
            name = f"attention_speed_{head_dim}.png"
            save(speed_figure(results, head_dim), folder / name)
            descriptions[name] = (
                "Speed of attention as a fraction of the machine's peak over the length, one "
                f"thread, 8 heads of {head_dim}"
            )
    results = [it for it in content.results if it.workload and it.workload.is_decoding]
    if results:
        save(decoding_figure(results), folder / "attention_decoding.png")
        descriptions["attention_decoding.png"] = (
            "Time of attention for one decoded token over the number of keys in the cache"
        )
    return descriptions


def is_square(workload: Workload | None, head_dim: int) -> bool:
    """Return whether the workload's rows have all dtypes, directions, masks and lengths."""
    return (
        workload is not None
        and workload.has_no_options
        and workload.query_heads == workload.key_heads == 8
        and workload.head_dim == head_dim
    )


def save(figure: Figure, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)


# ------------------------------------------------------------------------------------- the figures


def speed_figure(results: list[Result], head_dim: int) -> Figure:
    """Draw a panel for each direction and mask (rows) and dtype (columns); one thread."""
    panels: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.threads == 1 and result.workload:
            row = f"{result.workload.direction}, {result.workload.mask}"
            panels.setdefault((row, result.workload.dtype), []).append(result)
    rows = list(dict.fromkeys(row for row, _ in panels))
    columns = list(dict.fromkeys(dtype for _, dtype in panels))
    figure, axes = grid(len(rows), len(columns))
    for (row, dtype), members in panels.items():
        panel = axes[rows.index(row)][columns.index(dtype)]
        draw(panel, members, fraction_of_peak)
        draw_target(panel, members)
        panel.axhline(1, color=LIMIT, linewidth=0.8)
        panel.set_ylim(0, 1.08)
        panel.set_title(f"{dtype}, {row}", fontsize=10)
        if dtype == columns[0]:
            panel.set_ylabel("fraction of peak")
        if row == rows[-1]:
            panel.set_xlabel("length")
        panel.annotate(
            peak_of(members[0]), (0.01, 1), xycoords=("axes fraction", "data"),
            va="bottom", fontsize=7, color=LIMIT,
        )  # fmt: skip
    finish(figure, axes, f"Attention, 8 heads of {head_dim}, one thread; dotted: foo's target")
    return figure


def decoding_figure(results: list[Result]) -> Figure:
    """Draw a panel for each number of threads (rows) and dtype (columns)."""
    threads = sorted({it.threads for it in results})
    dtypes = list(dict.fromkeys(it.workload.dtype for it in results if it.workload))
    figure, axes = grid(len(threads), len(dtypes))
    for row, count in enumerate(threads):
        for column, dtype in enumerate(dtypes):
            panel = axes[row][column]
            members = [
                it
                for it in results
                if it.threads == count and it.workload and it.workload.dtype == dtype
            ]
            draw(panel, members, milliseconds)
            draw_reading(panel, members)
            panel.set_yscale("log")
            panel.set_title(f"{dtype}, {count} thread{'s' * (count > 1)}", fontsize=10)
            panel.yaxis.set_major_formatter("{x:g}")
            if column == 0:
                panel.set_ylabel("milliseconds per token")
            if count == threads[-1]:
                panel.set_xlabel("keys in the cache")
    workload = results[0].workload
    assert workload is not None
    finish(
        figure,
        axes,
        f"Attention of one query, {workload.heads} heads of {workload.head_dim}; "
        "dashed: the time to read keys and values",
    )
    return figure


# ------------------------------------------------------------------------------------- their parts


def grid(rows: int, columns: int) -> tuple[Figure, list[list[Axes]]]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=(3.6 * columns, 2.5 * rows + 0.8), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    return figure, [list(row) for row in axes]


def draw(
    panel: Axes,
    results: list[Result],
    height: Callable[[Result, str], float],
) -> None:
    """Draw a line for each contender, and the lengths as marks below."""
    results = sorted(results, key=length)
    for name, color in COLORS.items():
        points = [(length(it), height(it, name)) for it in results if it.seconds.get(name)]
        if points:
            width = 2.4 if name == OURS else 1.4
            panel.plot(
                *zip(*points), color=color, linewidth=width, marker="o", markersize=2 * width,
                label=name, zorder=3 if name == OURS else 2,
            )  # fmt: skip
    positions = [length(it) for it in results]
    panel.set_xscale("log", base=2)
    panel.set_xticks(positions, [short(it) for it in positions])
    panel.minorticks_off()
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def draw_target(panel: Axes, results: list[Result]) -> None:
    """Draw the target of our line."""
    points = [(length(it), least) for it in results if (least := target(it)) is not None]
    if points:
        panel.plot(*zip(*sorted(points)), color=COLORS[OURS], linestyle=":")


def draw_reading(panel: Axes, results: list[Result]) -> None:
    points = [
        (length(it), 1e3 * it.work / statistics.median(it.references[READ])) for it in results
    ]
    panel.plot(*zip(*sorted(points)), color=LIMIT, linestyle="--", linewidth=1)


def finish(figure: Figure, axes: list[list[Axes]], title: str) -> None:
    """Draw one legend for all panels, with every contender that occurs."""
    entries: dict[str, Artist] = {}
    for row in axes:
        for panel in row:
            handles, labels = panel.get_legend_handles_labels()
            entries |= dict(zip(labels, handles))
    names = [name for name in COLORS if name in entries]
    figure.suptitle(title, fontsize=11)
    figure.legend(
        [entries[name] for name in names], names, loc="outside lower center",
        ncols=len(names), frameon=False,
    )  # fmt: skip


def short(count: int) -> str:
    """Write a length as ``512`` or ``2k``."""
    return str(count) if count % 1024 else f"{count // 1024}k"


def length(result: Result) -> int:
    """Return the number of keys and values."""
    assert result.workload is not None
    return result.workload.key_length


def fraction_of_peak(result: Result, name: str) -> float:
    peak = statistics.median(result.references[peak_of(result)])
    return statistics.median(result.rates(name)) / peak


def milliseconds(result: Result, name: str) -> float:
    return 1e3 * statistics.median(result.seconds[name])
