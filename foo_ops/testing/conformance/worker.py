"""Run cases in a process of its own: one a line comes in, one outcome a line goes out.

A program, not to be imported. foo takes PyTorch's one key for devices from outside (PrivateUse1),
so that another device can only be compared in a process that does not load foo: there the packages
above this one are empty, and only the modules of this folder run.
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
        # In place of what torch does at its import, which the parent has switched off.
        for entry in importlib.metadata.entry_points(group="torch.backends"):
            if entry.name != "foo":
                entry.load()()
    for name in modules:
        importlib.import_module(name)


def main() -> None:
    device, *modules = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what torch prints must not mix with the answers
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
