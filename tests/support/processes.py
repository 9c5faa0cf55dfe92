"""Run programs in separate processes, since they may hang or be killed by a signal."""

import atexit
import functools
import json
import os
import py_compile
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from support import fork_server

# More than any program needs on a busy machine, and less than a hanging test may take.
SECONDS = 240


# ``become(user)`` gives up root's rights. The compiler runs once before, since this user may be
# unable to read the modules that Python imports.
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


# ``at(moment, action)`` acts the first time the compiler reaches a moment in its work.
AT_MOMENT = """
import time
from foo_ops.kernels.compiler import cache, emit

def at(moment, action):
    module = cache if moment in ("_key", "link") else emit
    function = getattr(module, moment)
    def changed(*arguments):
        setattr(module, moment, function)
        action()
        # The main thread gets to see a signal.
        time.sleep(0.1)
        return function(*arguments)
    setattr(module, moment, changed)
"""


# Variables read when foo_ops, Numba, Inductor, Accelerate or pytest are imported, or later. Other
# variables need a new process, since torch and its libraries have read them already.
READ_LATE = (
    *("FOO_", "NUMBA_", "PYTHONPATH", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCHINDUCTOR_"),
    *("ACCELERATE_", "PYTEST_"),
)

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = dict(os.environ)


def run(program, cache, *arguments, **environment):
    """Return a program's output and log; its kernels are kept in the folder ``cache``."""
    process = python(program, *arguments, FOO_CACHE_DIR=str(cache), **environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip(), process.stderr.strip()


def python(program, *arguments, seconds=SECONDS, **options):
    """Run a program (see `start`), and return a subprocess.CompletedProcess."""
    return start(program, *arguments, **options).wait(seconds)


def module(name):
    """Return a program equivalent to ``python -m name``."""
    return f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


def start(program, *arguments, folder=None, input="", new=False, **environment):
    """Start a program, which is text or a Path, as ``python -c text`` or ``python file`` does.

    The program runs in a fork of a process that has imported torch. If `new` is given, or the
    program
    sets variables that torch reads, it gets an interpreter of its own, which takes ten times as
    long.
    It can import everything that tests can: foo_ops, benchmarks and support. Its variables are
    those
    with which the tests started and the given ones, whatever libraries have set in this process
    since.
    """
    path = [*filter(None, [ENVIRONMENT.get("PYTHONPATH")]), REPOSITORY, REPOSITORY / "tests"]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, path))} | environment
    command = [str(program)] if isinstance(program, Path) else ["-c", program]
    return Process(
        {
            "command": [*command, *map(str, arguments)],
            "folder": os.getcwd() if folder is None else str(folder),
            "environment": ENVIRONMENT | environment,
            "is_new": new or any(not name.startswith(READ_LATE) for name in environment),
        },
        input,
    )


class Process:
    """A running program. Its remaining processes and output files end with this object."""

    def __init__(self, request, input):
        # Unnamed files: nothing is left on disk, and a program without root's rights can write
        # them.
        streams = [tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(3)]  # noqa: SIM115
        self._input, self._printed, self._logged = streams
        self._input.write(input)
        self._input.seek(0)
        status, status_of_server = os.pipe()
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115
        with tempfile.TemporaryFile("w+") as file, open(status_of_server, "wb"):
            json.dump(request, file)
            file.seek(0)
            descriptors = [file.fileno(), *(it.fileno() for it in streams), status_of_server]
            socket.send_fds(connection_to_server(), [b"."], descriptors)
        self.pid = self._number()

    def wait(self, seconds=SECONDS):
        """Return a subprocess.CompletedProcess; kill the program after this many seconds."""
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        is_late = not poll.poll(seconds * 1000)
        if is_late:
            os.kill(self.pid, signal.SIGKILL)
        code = self._number()
        printed, logged = self._text(self._printed), self._text(self._logged)
        if is_late:
            raise subprocess.TimeoutExpired("a program", seconds, printed, logged)
        return subprocess.CompletedProcess("a program", code, printed, logged)

    def _number(self):
        """Return the server's next number: first the process id, then its exit status."""
        number = self._status.read(fork_server.SIZE_OF_NUMBERS)
        assert number, "the server of forks has ended"
        return int.from_bytes(number, sys.byteorder, signed=True)

    def _text(self, file):
        file.seek(0)
        return file.read()


def connection_to_server():
    """Return the connection to this process's server; start one if there is none."""
    server, connection = start_server()
    if server.poll() is None:
        return connection
    start_server.cache_clear()
    return connection_to_server()


@functools.cache
def start_server():
    connection, connection_of_server = socket.socketpair()
    folder = tempfile.TemporaryDirectory(prefix="foo_ops-tests-")
    # Named like a module that Python itself runs under programs, as runpy: the sanitizer then omits
    # its calls.
    code = py_compile.compile(
        fork_server.__file__, f"{folder.name}/server.pyc", "<frozen fork_server>", doraise=True
    )
    server = subprocess.Popen(
        [sys.executable, code, str(connection_of_server.fileno())],
        env=ENVIRONMENT | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        # Ctrl-C goes to this process, which then ends the server.
        start_new_session=True,
        pass_fds=[connection_of_server.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    connection_of_server.close()
    atexit.register(stop, server, connection, folder)
    return server, connection


def stop(server, connection, folder):
    """End the server and all programs that still run."""
    connection.close()
    server.wait()
    folder.cleanup()
