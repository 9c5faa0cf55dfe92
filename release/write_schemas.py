"""Write foo_ops/_schemas.py: what foo_ops.ops defines, for the start of torch.

Run it when an operator has come, or has another schema: .venv/bin/python release/write_schemas.py
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

PACKAGE = "foo_ops.ops."

PATH = Path(__file__).parents[1] / "foo_ops/_schemas.py"
HEAD = '''"""The operators that foo_ops.ops defines: module, schema and tags. Written by
release/write_schemas.py.
"""

SCHEMAS = """\\
'''


def main() -> None:
    # What is declared must fit the extension, which the old table may not do.
    PATH.write_text(HEAD + '"""\n')
    PATH.write_text(text())


def text() -> str:
    """Return the file as it should be."""
    from foo_ops import ops  # noqa: F401
    from foo_ops.library.elementwise import BACKWARD_SCHEMAS
    from foo_ops.library.operators import DEFINITIONS

    own = {name: it for name, it in DEFINITIONS.items() if (it.module or "").startswith(PACKAGE)}
    rows = {name: row(it.module or "", it.schema, it.tags) for name, it in own.items()}
    for name, (schema, tags) in BACKWARD_SCHEMAS.items():
        if name.partition("_backward")[0] in own:
            rows[name] = row("", schema, tags)
    return HEAD + "".join(rows[name] for name in sorted(rows)) + '"""\n'


def row(module: str, schema: str, tags: Sequence[torch.Tag]) -> str:
    return f"{module}; {schema}; {' '.join(tag.name for tag in tags)}\n"


if __name__ == "__main__":
    main()
