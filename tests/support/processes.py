"""Run programs in processes of their own, since these may hang, or end by a signal."""

import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


# Read when foo_ops or Numba are imported, or later. For others a process must be new, since torch
# and the libraries that it loads have read them.
READ_LATE = ("FOO_", "NUMBA_")


def run(program, cache, *arguments, **environment):
    """Return what the program printed and logged. It keeps its kernels in a folder of its own."""
    process = python(program, *arguments, FOO_CACHE_DIR=str(cache), **environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip(), process.stderr.strip()


def python(program, *arguments, seconds=SECONDS, **environment):
    """Run a program as ``python -c`` does, and return how it ended, and what it printed."""
    return start(program, *arguments, **environment).wait(seconds)


def start(program, *arguments, folder=None, **environment):
    """Start a program, in a fork of a process that has imported torch where that is the same."""
    folder = os.getcwd() if folder is None else str(folder)
    arguments = [str(argument) for argument in arguments]
    changed = {
        name
        for name in environment | os.environ | _environment_at_start
        if (os.environ | environment).get(name) != _environment_at_start.get(name)
    }
    is_new = any(not name.startswith((*READ_LATE, "PYTEST_")) for name in changed)
    kind = NewProcess if is_new else ForkedProcess
    return kind(program, arguments, folder, os.environ | environment)


_environment_at_start = dict(os.environ)


class NewProcess:
    """A program in a new interpreter."""

    def __init__(self, program, arguments, folder, environment):
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self):
        return self._process.pid

    def wait(self, seconds=SECONDS):
        """Return a subprocess.CompletedProcess."""
        try:
            printed, logged = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        process = self._process
        return subprocess.CompletedProcess(process.args, process.returncode, printed, logged)


class ForkedProcess:
    """A program in a fork of the server, which this process starts when it needs it first."""

    def __init__(self, program, arguments, folder, environment):
        self._files = tempfile.TemporaryDirectory(prefix="foo_ops-test-")
        files = Path(self._files.name)
        self._paths = {name: files / name for name in ("stdout", "stderr", "status")}
        for name in ("stdout", "stderr"):
            self._paths[name].touch()
        os.mkfifo(self._paths["status"])
        # A program that gives up the rights of root writes to what is open already.
        self._status = os.open(self._paths["status"], os.O_RDONLY | os.O_NONBLOCK)
        self._said = b""
        request = {name: str(path) for name, path in self._paths.items()}
        request |= {"program": program, "arguments": arguments}
        request |= {"folder": folder, "environment": environment}
        server = fork_server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()

    @functools.cached_property
    def pid(self):
        return int(self._line(0, time.monotonic() + SECONDS))

    def _line(self, number, deadline):
        """Return a line of what the server says: the process, then how it ended."""
        while self._said.count(b"\n") <= number:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._status], [], [], remaining)[0]:
                raise TimeoutError
            self._said += os.read(self._status, 100)
        return self._said.splitlines()[number]

    def wait(self, seconds=SECONDS):
        """Return a subprocess.CompletedProcess."""
        try:
            code = int(self._line(1, time.monotonic() + seconds))
        except TimeoutError:
            os.killpg(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired("-c", seconds) from None
        os.close(self._status)
        printed, logged = (self._paths[name].read_text() for name in ("stdout", "stderr"))
        self._files.cleanup()
        return subprocess.CompletedProcess("-c", code, printed, logged)


@functools.cache
def fork_server():
    """Start the server of this process, which ends with it."""
    program = "from fork_server import serve; serve()"
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    paths = (str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        text=True,
    )
