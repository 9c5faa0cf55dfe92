"""Output of the demo: training progress, the loss curve, the sample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from foo_ops.demo.training import Point

TRAIN_COLOUR = "#4878a8"
VALIDATION_COLOUR = "#d1662b"
SMOOTHED_SHARE = 0.025


def follow(console: Console, points: Iterable[Point], steps: int) -> list[Point]:
    """Show the points as they arrive, and return them all."""
    if console.is_interactive:
        return follow_with_bar(console, points, steps)
    return follow_with_lines(console, points, steps)


def follow_with_bar(console: Console, points: Iterable[Point], steps: int) -> list[Point]:
    """Show a progress bar, for a terminal."""
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    history: list[Point] = []
    with Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task("starting", total=steps)
        for point in points:
            history.append(point)
            progress.update(task, completed=point.step, description=describe(history))
    return history


def follow_with_lines(console: Console, points: Iterable[Point], steps: int) -> list[Point]:
    """Print a line for each validation, for a file or a log."""
    history: list[Point] = []
    for point in points:
        history.append(point)
        if point.validation_loss is not None:
            console.print(f"step {point.step:>{len(str(steps))}}/{steps}  {describe(history)}")
    return history


def describe(history: Sequence[Point]) -> str:
    """Describe the state of the run: the last losses and the speed."""
    last = history[-1]
    validation = next(p.validation_loss for p in reversed(history) if p.validation_loss is not None)
    speed = f"{last.tokens_per_second:,.0f}" if last.tokens_per_second else "-"
    return f"loss {last.loss:.3f}  validation {validation:.3f}  {speed} tokens/s"


def sample_panel(prompt: bytes, continuation: bytes) -> Panel:
    """Frame the text; the prompt is dim, and control characters become dots."""
    text = Text(printable(prompt), style="dim")
    text.append(printable(continuation), style="not dim")
    return Panel(text, title="generated", border_style=VALIDATION_COLOUR, width=80)


def printable(text: bytes) -> str:
    characters = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in characters)


def save_loss_curve(history: Sequence[Point], title: str, path: Path) -> None:
    """Plot training and validation loss against the step into a PNG."""
    steps = [point.step for point in history]
    losses = [point.loss for point in history]
    validated = [(p.step, p.validation_loss) for p in history if p.validation_loss is not None]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color=TRAIN_COLOUR, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smoothed(losses), color=TRAIN_COLOUR, linewidth=1.8, label="train")
    axes.plot(*zip(*validated), "o-", color=VALIDATION_COLOUR, markersize=4, label="validation")
    final_step, final_loss = validated[-1]
    axes.annotate(
        f"{final_loss:.2f}",
        (final_step, final_loss),
        xytext=(8, 0),
        textcoords="offset points",
        color=VALIDATION_COLOUR,
        verticalalignment="center",
    )
    axes.set(xlabel="training step", ylabel="loss (nats per byte)", xlim=(0, steps[-1] * 1.06))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return at each step the mean of the losses around it."""
    reach = math.ceil(len(losses) * SMOOTHED_SHARE / 2)
    around = (losses[max(0, at - reach) : at + reach + 1] for at in range(len(losses)))
    return [sum(window) / len(window) for window in around]
