"""Count the lines of code of an operator."""

from __future__ import annotations

import inspect
import tokenize
from collections.abc import Iterator
from pathlib import Path

import foo_ops.ops
from benchmarks.operators import OPERATORS

_LAYOUT = {
    *(tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def count(path: Path) -> int:
    """Count the lines of a Python file that are neither empty nor a comment nor a docstring."""
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    return len(set(_lines_of_code(tokens)))


def _lines_of_code(tokens: list[tokenize.TokenInfo]) -> Iterator[int]:
    starts_statement = True
    for token in tokens:
        is_docstring = starts_statement and token.type == tokenize.STRING
        if token.type not in _LAYOUT and not is_docstring:
            yield from range(token.start[0], token.end[0] + 1)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            starts_statement = token.type in _LAYOUT


def report() -> str:
    """Report the lines of the one-file operators: elementwise ones and those of models."""
    names = dict.fromkeys(name.removeprefix("add_") for name in OPERATORS)
    files = {it: inspect.getfile(getattr(foo_ops.ops, it)) for it in ("abs", *names)}
    counts = [f"{name} {count(Path(file))}" for name, file in files.items()]
    return (
        "Lines of code, without comments and docstrings (add_rms_norm is part of rms_norm, "
        "add_layer_norm of layer_norm): "
        f"{', '.join(counts)}."
    )
