"""Run cases in a separate process: reads one case per line, writes one outcome per line.

A program, not to be imported. foo occupies PyTorch's only key for external devices (PrivateUse1),
so another device needs a process that does not load foo: there the packages above this one are
empty, and only the modules of this folder run.
"""

import importlib
import importlib.metadata
import json
import os
import sys
import traceback
import types
from pathlib import Path

ROOM = Path(__file__).parent


def load_device(device: str, modules: list[str]) -> None:
    sys.path.remove(str(ROOM))
    if device != "foo":
        for name, folder in (("foo_ops", ROOM.parents[1]), ("foo_ops.testing", ROOM.parent)):
            package = types.ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
        # torch does the same at import, but the parent has switched that off.
        for entry in importlib.metadata.entry_points(group="torch.backends"):
            if entry.name != "foo":
                entry.load()()
    for name in modules:
        importlib.import_module(name)


def main() -> None:
    device, *modules = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps torch's output apart from the answers
    load_device(device, modules)
    from foo_ops.testing.conformance import cases, comparison

    comparison.choose_device(device)
    print(json.dumps(cases.all_cases()), file=answers)
    for line in sys.stdin:
        try:
            cases.run(cases.Case(*json.loads(line)))
            message = None
        except Exception as error:
            message = str(error) or traceback.format_exc()
        print(json.dumps(message), file=answers)


if __name__ == "__main__":
    main()
