"""Runs contenders in a process of their own, where neither they nor foo_ops affect the other.

``python -m benchmarks.own_process MODULE:CLASS DESCRIPTOR`` serves the methods of an object of a
class through a connection.
"""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from typing import Any


class OwnProcess:
    """A process that has an object of a class, ``MODULE:CLASS``; it ends with this object."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.connection, there = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.own_process", server, str(there.fileno())],
            pass_fds=[there.fileno()],
            # As the contender's users have it, without foo_ops.
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )
        there.close()

    def __del__(self) -> None:
        self.connection.close()
        self.process.wait()

    def request(self, name: str, *arguments: Any) -> Any:
        """Call a method there, and return its result or raise its exception."""
        try:
            self.connection.send((name, arguments))
            succeeded, value = self.connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the process of {self.server} has ended") from error
        if not succeeded:
            raise value
        return value


# ----------------------------------------------------------------------------- in that process


def serve(server: Any, connection: Connection) -> None:
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(server, name)(*arguments)
        except Exception as error:
            answer = False, error
        connection.send(answer)


if __name__ == "__main__":
    serve(pkgutil.resolve_name(sys.argv[1])(), Connection(int(sys.argv[2])))
