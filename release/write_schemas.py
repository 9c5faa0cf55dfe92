"""Write foo_ops/_schemas.py: what foo_ops.ops defines, for the start of torch.

Run it when an operator has come, or has another schema: .venv/bin/python release/write_schemas.py
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foo_ops._operators import Definition

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
    from foo_ops.library.elementwise import BACKWARD_DEFINITIONS
    from foo_ops.library.operators import DEFINITIONS

    known = {**DEFINITIONS, **BACKWARD_DEFINITIONS}
    names = sorted(name for name in known if name.startswith("foo::"))
    return HEAD + "".join(row(known[name]) for name in names) + '"""\n'


def row(definition: Definition) -> str:
    tags = " ".join(tag.name for tag in definition.tags)
    return f"{definition.module or ''}; {definition.schema}; {tags}\n"


if __name__ == "__main__":
    main()
