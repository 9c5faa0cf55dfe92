"""Makes tables from a results file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table

from benchmarks import (
    code_lines,
    device,
    encoders,
    experts,
    flex,
    linear,
    models,
    operators,
    peaks,
    quantized_linear,
    tutorial,
)
from benchmarks.measure import OURS, Result
from benchmarks.results_file import Content
from benchmarks.sections import SECONDS_IN_UNIT, SECTIONS
from benchmarks.targets import (
    FIRST_CALL_SECONDS,
    against_peer,
    best_peer,
    device_limits,
    device_verdict,
    first_call_verdict,
    fractions,
    linear_target,
    linear_verdict,
    peak_of,
    peer_requirement,
    quartiles,
    ratios,
    slower_models,
    speedups,
    target,
    verdict,
)

NONE = "-"
TEXTS = ("case", "contender", "verdict")
FOLDED = 16
"""The width that a verdict may be folded to."""
NOT_JUDGED = "not judged: one core"
LEGEND = (
    "Of peak: of the FMA peak; for bfloat16 that of the matrix unit (AMX) or the bf16 dot peak "
    "where the processor has one; for one query and few rows the read bandwidth; on as many "
    "threads. Target: what that fraction is to be, none of a matrix unit. Two threads are to be "
    "1.85 times one. flash and math are PyTorch's backends, flex is compiled FlexAttention. "
    "Useful work: of the matrix products (two forward, five backward) for each pair of a query "
    "and a key that it sees. Of reading: of the read bandwidth; compiled: PyTorch's operators "
    "under torch.compile. torch.ops.aten: the same of PyTorch, called by the way that leads to "
    "ours."
)


# ---------------------------------------------------------------------------------------- tables


def caption(content: Content) -> str:
    """Describe the machine and the method of the measurements."""
    machine = content.machine
    names = ("foo_ops", "torch", "zentorch", "torchao", "numba", "llvmlite")
    # Results of older runs lack some versions.
    versions = ", ".join(f"{name} {machine[name]}" for name in names if name in machine)
    return (
        f"{machine['processor']} ({machine['llvm target'].partition(',')[0]}), vectors of "
        f"{machine['vector bits']} bits, {machine['vector units']}, {machine['processors']} "
        f"processors, caches: {machine['caches'] or 'unknown'}; {versions}; Python "
        f"{machine['python']}; {content.date[:10]}. Medians of rounds in which all contenders take "
        "turns; a ratio is taken round by round, with its quartiles in brackets."
    )


def table_of(content: Content, section: str, results: Sequence[Result]) -> list[list[str]]:
    """Return the header and the rows of a table."""
    if section in ("peaks", "bandwidth"):
        return peak_table(results, SECTIONS[section].unit)
    if section == "first call":
        return first_call_table(results)
    if section in (operators.SECTION, tutorial.SECTION, experts.FEW_TOKENS):
        return operator_table(content, results, SECTIONS[section].unit)
    if section in (linear.SECTION, linear.FEW_ROWS):
        return linear_table(content, results, SECTIONS[section].unit, ("torch",))
    if section in quantized_linear.SECTIONS:
        return linear_table(content, results, SECTIONS[section].unit, quantized_linear.PEERS)
    if section == encoders.SECTION:
        return target_table(content, results, SECTIONS[section].unit)
    if section == flex.SECTION:
        return peer_table(content, results, SECTIONS[section].unit)
    if section == device.SECTION:
        return device_table(content, results, SECTIONS[section].unit)
    if results[0].workload is None:
        return comparison_table(results, SECTIONS[section].unit)
    return attention_table(content, results, SECTIONS[section].unit)


def peak_table(results: Sequence[Result], unit: str) -> list[list[str]]:
    rows = [["case", "threads", "median", "quartiles"]]
    for result in results:
        if result.failures:
            rows.append([result.name, str(result.threads), "absent", NONE])
            continue
        (times,) = result.seconds.values()
        low, middle, high = quartiles([figure(seconds, result.work, unit) for seconds in times])
        spread = f"{number(low)}-{number(high)}"
        rows.append([result.name, str(result.threads), number(middle), spread])
    return rows


def comparison_table(results: Sequence[Result], unit: str) -> list[list[str]]:
    """Return rows with ratios of the figures shown; the title says which direction is better.

    Ours with an option, as in ``foo, 8 bits``, is compared with the peers that also have it.
    """
    ours, *others = dict.fromkeys(name for result in results for name in result.seconds)
    pairs = [(_with_option(ours, it, others), it) for it in others if not it.startswith(f"{ours},")]
    rows = [["case", "threads", ours, *others, *(f"{one} / {other}" for one, other in pairs)]]
    for result in results:
        figures = {
            name: [figure(each, result.work, unit) for each in seconds]
            for name, seconds in result.seconds.items()
        }
        medians = [median(figures[name]) if name in figures else NONE for name in (ours, *others)]
        compared = [
            spread(ratios(figures[one], figures[other])) if {one, other} <= {*figures} else NONE
            for one, other in pairs
        ]
        rows.append([result.name, str(result.threads), *medians, *compared])
    return rows


def target_table(content: Content, results: Sequence[Result], unit: str) -> list[list[str]]:
    """Return rows with all peers, and the target relative to the best of them."""
    header, *rows = comparison_table(results, unit)
    for row, result in zip(rows, results):
        if not result.peers():
            row += [number(result.least or 0.0), NONE]
            continue
        it = peer_requirement(result)
        row += [number(it.least), judgement(content, result, it.shortfall() or "reached")]
    return [[*header, "target", "verdict"], *rows]


def _with_option(ours: str, peer: str, others: Sequence[str]) -> str:
    """Return ours with the peer's option, as in ``llama.cpp, 8 bits``, if there is one."""
    _, comma, option = peer.partition(",")
    return ours + comma + option if ours + comma + option in others else ours


def efficiency_table(results: Sequence[Result], unit: str) -> list[list[str]]:
    """Return rows of ours and of the fastest peer on most threads, for cases on several.

    A cell has the figure, and in brackets the speed over that of one thread and the number of
    threads.
    """
    rows_of: dict[str, dict[int, Result]] = {}
    for result in results:
        rows_of.setdefault(result.name, {})[result.threads] = result
    counts = sorted({it.threads for it in results})
    rows = [["case", "contender", *(threads_text(count) for count in counts)]]
    for name, found in rows_of.items():
        if len(found) < 2 or 1 not in found:
            continue
        last = found[max(found)]
        for contender in filter(None, (OURS, best_peer(last))):
            cells = [efficiency_cell(found, count, contender, unit) for count in counts]
            rows.append([name, contender, *cells])
    return rows


def threads_text(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def efficiency_cell(found: dict[int, Result], count: int, contender: str, unit: str) -> str:
    if count not in found or contender not in found[count].seconds:
        return NONE
    cell = peer_cell(found[count], contender, unit)
    if count == 1 or contender not in found[1].seconds:
        return cell
    alone, together = (statistics.median(found[it].seconds[contender]) for it in (1, count))
    return f"{cell} ({alone / together / count:.2f})"


def device_table(content: Content, results: Sequence[Result], unit: str) -> list[list[str]]:
    rows = [["case", "threads", OURS, device.CPU, "at most", "verdict"]]
    for result in results:
        limits = [figure(seconds, result.work, unit) for seconds in device_limits(result)]
        cells = [peer_cell(result, name, unit) for name in (OURS, device.CPU)]
        verdict = judgement(content, result, device_verdict(result))
        rows.append([result.name, str(result.threads), *cells, median(limits), verdict])
    return rows


def operator_table(content: Content, results: Sequence[Result], unit: str) -> list[list[str]]:
    peers = list(dict.fromkeys(name for result in results for name in result.peers()))
    rows = [["case", "threads", OURS, "of reading", *peers, f"{OURS} / best peer", "verdict"]]
    for result in results:
        peer = best_peer(result)
        rows.append(
            [
                result.name,
                str(result.threads),
                median([figure(it, result.work, unit) for it in result.seconds[OURS]]),
                median(fractions(result, peaks.READ)) if result.references else NONE,
                *(peer_cell(result, name, unit) for name in peers),
                spread(speedups(result, peer)) if peer else NONE,
                judgement(content, result, verdict(result, content.one_thread(result))),
            ]
        )
    return rows


def peer_table(content: Content, results: Sequence[Result], unit: str) -> list[list[str]]:
    """Return rows with one peer each, which their names contain, and its target."""
    rows = [["case", "threads", OURS, "peer", "times as fast", "target", "verdict"]]
    for result in results:
        row = [result.name, str(result.threads), peer_cell(result, OURS, unit)]
        if not result.peers():
            rows.append([*row, NONE, NONE, number(result.least or 0.0), NONE])
            continue
        it = peer_requirement(result)
        verdict = judgement(content, result, it.shortfall() or "reached")
        peer = peer_cell(result, it.reference, unit)
        rows.append([*row, peer, spread(it.measured), number(it.least), verdict])
    return rows


def gallery_table(results: Sequence[Result], peer: str) -> list[list[str]]:
    """Return a row for each variant: milliseconds, and the speed relative to the peer."""
    rows: dict[str, list[str]] = {}
    columns: dict[str, None] = {}
    for result in results:
        variant, direction, dtype, *_ = result.name.split(", ")
        columns[f"{direction}, {dtype}"] = None
        speedup = statistics.median(speedups(result, peer))
        cell = f"{peer_cell(result, OURS, 'ms')} ms ({number(speedup)})"
        rows.setdefault(variant, [variant]).append(cell)
    return [["variant", *columns], *rows.values()]


def linear_table(
    content: Content, results: Sequence[Result], unit: str, peers: Sequence[str]
) -> list[list[str]]:
    """Return rows with targets for one thread; two threads are compared with one."""
    rows = [["case", "threads", OURS, "of peak", "target", "one thread"]]
    rows[0] += [*peers, f"{OURS} / torch", "verdict"]
    for result in results:
        one_thread = content.one_thread(result)
        rows.append(
            [
                result.name,
                str(result.threads),
                median([figure(it, result.work, unit) for it in result.seconds[OURS]]),
                spread(fractions(result, peak_of(result))),
                NONE if one_thread else f"{linear_target(result):.2f}",
                scaling(result, one_thread) if one_thread else NONE,
                *(peer_cell(result, name, unit) for name in peers),
                spread(speedups(result, "torch")) if "torch" in result.seconds else NONE,
                judgement(content, result, linear_verdict(result, one_thread)),
            ]
        )
    return rows


def first_call_table(results: Sequence[Result]) -> list[list[str]]:
    rows = [["case", "threads", *FIRST_CALL_SECONDS, "verdict"]]
    for result in results:
        times = [
            median([figure(seconds, 0.0, "ms") for seconds in result.seconds[name]])
            for name in FIRST_CALL_SECONDS
        ]
        rows.append([result.name, str(result.threads), *times, first_call_verdict(result)])
    return rows


def attention_table(content: Content, results: Sequence[Result], unit: str) -> list[list[str]]:
    peers = list(dict.fromkeys(name for result in results for name in result.peers()))
    header = ["case", "threads", OURS, "of peak", "target", "one thread"]
    rows = [[*header, *peers, f"{OURS} / best peer", "verdict"]]
    for result in results:
        one_thread = content.one_thread(result)
        peer, least = best_peer(result), target(result)
        rows.append(
            [
                result.name,
                str(result.threads),
                median([figure(it, result.work, unit) for it in result.seconds[OURS]]),
                spread(fractions(result, peak_of(result))),
                f"{least:.2f}" if least is not None else NONE,
                scaling(result, one_thread) if one_thread else NONE,
                *(peer_cell(result, name, unit) for name in peers),
                spread(speedups(result, peer)) if peer else NONE,
                judgement(content, result, verdict(result, one_thread)),
            ]
        )
    return rows


def digest_table(content: Content, results: Sequence[Result], unit: str) -> list[list[str]]:
    """Return a row per case on one thread, with columns for two threads and the fastest peer."""
    rows = [["case", OURS, "of peak", "target", "2 threads", "best peer", f"{OURS} / best peer"]]
    for result in (it for it in results if it.threads == 1):
        two_threads = content.on_threads(result, 2)
        peer, least = best_peer(result), target(result)
        rows.append(
            [
                result.name,
                median([figure(it, result.work, unit) for it in result.seconds[OURS]]),
                f"{statistics.median(fractions(result, peak_of(result))):.2f}",
                f"{least:.2f}" if least is not None else NONE,
                scaling(two_threads, result) if two_threads else NONE,
                f"{peer} {peer_cell(result, peer, unit)}" if peer else NONE,
                spread(speedups(result, peer)) if peer else NONE,
            ]
        )
    return rows


def scaling(result: Result, one_thread: Result) -> str:
    return f"{statistics.median(ratios(result.rates(OURS), one_thread.rates(OURS))):.2f} x"


def judgement(content: Content, result: Result, verdict: str) -> str:
    return verdict if content.is_judged(result) else NOT_JUDGED


def tally(content: Content) -> str:
    """Count the rows of attention that reach all targets, and those where a peer is faster."""
    rows = [it for it in content.results if it.workload and content.is_judged(it)]
    verdicts = [verdict(it, content.one_thread(it)) for it in rows]
    slower = [against_peer(it) for it in rows]
    return (
        f"Of {len(rows)} rows of attention, {verdicts.count('reached')} reach all that is asked of "
        f"them; in {sum('slower' in it for it in slower)} a peer is faster."
    )


def slower(content: Content) -> str:
    """List the rows in which `apply` makes a model slower, if models were measured."""
    if not any(it.section == models.SECTION for it in content.results):
        return ""
    rows = [
        f"{result.name} ({threads_text(result.threads)}) {speed:.3f}"
        for result, speed in slower_models(content.results)
    ]
    return " ".join(["apply makes slower:", "; ".join(rows)]).rstrip()


def peer_cell(result: Result, name: str, unit: str) -> str:
    if name not in result.seconds:
        return NONE
    return median([figure(seconds, result.work, unit) for seconds in result.seconds[name]])


def figure(seconds: float, work: float, unit: str) -> float:
    if unit in SECONDS_IN_UNIT:
        return seconds / SECONDS_IN_UNIT[unit]
    return work / seconds / (1e9 if unit.startswith("G") else 1)


def median(values: Sequence[float]) -> str:
    return number(statistics.median(values))


def number(value: float) -> str:
    """Format with three significant digits: 0.12, 1.23, 12.3, 123, 1234."""
    digits = max(0, 2 - (len(str(int(value))) - 1))
    return f"{value:.{digits}f}"


def spread(values: Sequence[float]) -> str:
    """Format the median, and the quartiles if there is more than one value."""
    low, middle, high = quartiles(values)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})" if len(values) > 1 else f"{middle:.2f}"


def _in_lines(column: str) -> str:
    return column.replace(", ", ",\n").replace(" / ", " /\n")


def _parts(rows: list[list[str]], width: int) -> list[list[list[str]]]:
    """Split a table that is too wide for the console; each part repeats case and threads."""
    header = rows[0]
    repeated = [place for place, column in enumerate(header) if column in ("case", "threads")]
    parts = [repeated]
    for place in range(len(header)):
        if place in repeated:
            continue
        taken = sum(_width(rows, it) for it in (*parts[-1], place)) + 1
        if taken > width and parts[-1] != repeated:
            parts.append(repeated)
        parts[-1] = [*parts[-1], place]
    return [[[row[place] for place in part] for row in rows] for part in parts]


def _width(rows: list[list[str]], place: int) -> int:
    """Return the width of a column with a border. A verdict may be folded."""
    header, *cells = (row[place] for row in rows)
    most = FOLDED if header == "verdict" else max(map(len, cells), default=0)
    return max(most, *map(len, _in_lines(header).split("\n"))) + 3


def print_table(console: Console, title: str, rows: list[list[str]]) -> None:
    heading = title
    for header, *lines in _parts(rows, console.width):
        table = Table(title=heading, title_justify="left", title_style="bold")
        for column in header:
            is_text = column in TEXTS
            justify: JustifyMethod = "left" if is_text else "right"
            table.add_column(_in_lines(column), justify=justify, no_wrap=not is_text)
        for line in lines:
            table.add_row(*line)
        console.print(table)
        heading = f"{title}, continued"


def print_tables(console: Console, content: Content, with_efficiency: bool = False) -> None:
    for name, results in content.by_section().items():
        title = SECTIONS[name].title
        print_table(console, title, table_of(content, name, results))
        efficiencies = efficiency_table(results, SECTIONS[name].unit) if with_efficiency else []
        if len(efficiencies) > 1:
            print_table(console, f"{title}: efficiency of threads", efficiencies)
    texts = (
        *(content.one_core, tally(content), slower(content)),
        *(code_lines.report(), LEGEND, caption(content)),
    )
    for text in filter(None, texts):
        console.print(text, markup=False)
    for failure in content.failures():
        console.print(f"Not measured: {failure}", markup=False)
