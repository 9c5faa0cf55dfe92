"""Run programs in processes of their own, since these may hang, or end by a signal."""

import os
import subprocess
import sys

# More than a program needs on a busy machine, and less than a test that hangs may take.
SECONDS = 240


# ``become(user)`` gives up the rights of root. The compiler is used once before, since what Python
# imports may not be for this user to read.
BECOME = """
import os, tempfile
import torch

def become(user):
    chosen = os.environ.get("FOO_CACHE_DIR")
    with tempfile.TemporaryDirectory() as os.environ["FOO_CACHE_DIR"]:
        torch.ops.foo.abs(torch.ones(3, dtype=torch.int8))
    del os.environ["FOO_CACHE_DIR"]
    if chosen is not None:
        os.environ["FOO_CACHE_DIR"] = chosen
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
"""


# ``at(moment, action)`` acts when the compiler comes to a moment for the first time, in the
# middle of its work.
AT_MOMENT = """
import time
from foo_ops.kernels.compiler import emit, load

def at(moment, action):
    module = load if moment in ("_key", "link") else emit
    function = getattr(module, moment)
    def changed(*arguments):
        setattr(module, moment, function)
        action()
        # The main thread gets to see a signal.
        time.sleep(0.1)
        return function(*arguments)
    setattr(module, moment, changed)
"""


def run(program, cache, *arguments, **environment):
    """Return what the program printed and logged. It keeps its kernels in a folder of its own."""
    process = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"FOO_CACHE_DIR": str(cache)} | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip(), process.stderr.strip()
