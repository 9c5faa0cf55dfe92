"""Private names of torch are in foo_ops/compat.py only, and the installed torch has them all."""

import ast
import json
import re
from collections import defaultdict
from pathlib import Path

from support.processes import python

REPOSITORY = Path(__file__).parents[2]
COMPAT = REPOSITORY / "foo_ops/compat.py"
FILES = sorted((REPOSITORY / "foo_ops").rglob("*.py"))
OWNERS = ("torch", "functorch", "foo_ops.compat")
MODULE = re.compile(r"torch(\.\w+)+")


def is_private(name):
    """Return whether a dotted name is one of torch's, with a part that begins with an underscore.

    Operators have a schema, which is public.
    """
    is_torchs = any(name.startswith(f"{owner}.") for owner in OWNERS)
    return is_torchs and not name.startswith("torch.ops.") and re.search(r"\._(?!_)", name)


def imported(node):
    """Return what an import statement binds: local names, and the dotted names that they stand for.

    ``import torch.nn`` binds torch.
    """
    if isinstance(node, ast.ImportFrom):
        return {it.asname or it.name: f"{node.module}.{it.name}" for it in node.names}
    return {it.asname or it.name.split(".")[0]: it.name for it in node.names}


def dotted(node, bound):
    """Return ``a.b.c`` in full if an import binds ``a``, else an empty string."""
    if isinstance(node, ast.Attribute):
        start = dotted(node.value, bound)
        return start and f"{start}.{node.attr}"
    return bound.get(node.id, "") if isinstance(node, ast.Name) else ""


def private_names(path):
    """Yield private names of torch in a file, and their lines.

    They are imported, looked up, or written as a text, such as the name of a module.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imports = [it for it in nodes if isinstance(it, (ast.Import, ast.ImportFrom))]
    bound = {"torch": "torch"}
    for it in imports:
        yield from ((name, it.lineno) for name in imported(it).values() if is_private(name))
        bound |= {own: name for own, name in imported(it).items() if own != name.split(".")[0]}
    starts = {id(it.value) for it in nodes if isinstance(it, ast.Attribute)}
    for it in nodes:
        if isinstance(it, ast.Attribute) and id(it) not in starts and is_private(dotted(it, bound)):
            yield dotted(it, bound), it.lineno
        elif isinstance(it, ast.Constant) and MODULE.fullmatch(str(it.value)):
            yield from [(it.value, it.lineno)] if is_private(it.value) else []


def entries():
    """Return the names that compat.py offers: aliases, and those of its table."""
    assigned = [it for it in ast.parse(COMPAT.read_text()).body if isinstance(it, ast.Assign)]
    values = {it.targets[0].id: it.value for it in assigned}
    later = [key.value for key in values["LATER"].keys]
    return [name for name in values if name != "LATER" and not name.startswith("_")] + later


def test_private_names_are_in_compat_only():
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {name}"
        for path in FILES
        if path != COMPAT
        for name, line in private_names(path)
    ]
    assert found == []


def test_private_names_are_found(tmp_path):
    file = tmp_path / "uses.py"
    file.write_text(
        "import torch.nn\n"
        "import torch._dynamo\n"
        "from torch.utils import _pytree as pytree, data\n"
        "torch._C.DispatchKey, torch.ops.aten._to_copy, torch.__version__, tensor._version\n"
        "pytree.tree_map, data._utils\n"
        "wait_for('torch._inductor.compile_fx')\n"
        "def f():\n"
        "    from foo_ops.compat import V\n"
        "    V.graph, V._graph\n"
    )
    found = defaultdict(list)
    for name, line in private_names(file):
        found[line].append(name)
    assert found == {
        2: ["torch._dynamo"],
        3: ["torch.utils._pytree"],
        4: ["torch._C.DispatchKey"],
        5: ["torch.utils._pytree.tree_map", "torch.utils.data._utils"],
        6: ["torch._inductor.compile_fx"],
        9: ["foo_ops.compat.V._graph"],
    }


def test_each_entry_is_used():
    used = {
        name.removeprefix("foo_ops.compat.")
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "foo_ops.compat"
        for name in imported(node).values()
    }
    assert used == set(entries())


def test_torch_has_each_entry():
    """In a process of its own: it loads Dynamo, Inductor and torch's tables of operators."""
    program = f"""
import importlib, json
from foo_ops import compat
missing = []
for name in {entries()}:
    try:
        entry = getattr(compat, name)
        if name.isupper() and isinstance(entry, str):
            importlib.import_module(entry)
    except (AttributeError, ImportError) as error:
        missing.append(f"{{name}}: {{error}}")
print(json.dumps(missing))
"""
    process = python(program)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == []
