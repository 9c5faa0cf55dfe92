"""Run programs in forks of a process that has imported torch: a new interpreter takes a second.

The server has imported neither foo_ops nor Numba, started no thread and called no kernel.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import types

SIZE_OF_NUMBERS = 4


def serve(connection):
    """Fork for each request until the tests end; return in the program's own process."""
    programs = {}
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in programs:
                poll.unregister(descriptor)
                finish(descriptor, *programs.pop(descriptor))
                continue
            _, files, _, _ = socket.recv_fds(connection, 1, 5)
            if not files:
                for descriptor, program in programs.items():
                    finish(descriptor, *program)
                os._exit(0)
            request_file, *streams, status = files
            with open(request_file) as file:
                request = json.load(file)
            if not request["is_new"]:
                import torch  # noqa: F401

                # A collection in a fork, for example at exit, would copy every page that it visits.
                gc.freeze()
            process = os.fork()
            if process == 0:
                connection.close()
                for descriptor, (_, status_of_another) in programs.items():
                    os.close(descriptor)
                    os.close(status_of_another)
                become(request, streams, status)
                return request
            for stream in streams:
                os.close(stream)
            descriptor = os.pidfd_open(process)
            programs[descriptor] = process, status
            poll.register(descriptor, select.POLLIN)


def finish(descriptor, process, status):
    """Kill a program's remaining processes, and send its exit status."""
    # Until the program is waited for, no other process gets its id.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    # The reader may be gone.
    with contextlib.suppress(BrokenPipeError):
        send(status, code)
    os.close(status)
    os.close(descriptor)


def send(status, number):
    os.write(status, number.to_bytes(SIZE_OF_NUMBERS, sys.byteorder, signed=True))


def become(request, streams, status):
    """Set up this process as if a shell had started it."""
    os.setpgid(0, 0)
    send(status, os.getpid())
    os.close(status)
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    # A shell that runs the tests in the background makes them ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    if request["is_new"]:
        command = [sys.executable, *request["command"]]
        os.execve(sys.executable, command, request["environment"])
    given = folders_of_python_path()
    os.environ.clear()
    os.environ.update(request["environment"])
    others = [folder for folder in sys.path[1:] if folder not in given]
    sys.path[1:] = [*folders_of_python_path(), *others]


def folders_of_python_path():
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [os.path.abspath(folder) for folder in folders if folder]


def program_of(command):
    """Return the code of ``-c PROGRAM`` or a file, and the module in which it is to run."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path[0] = ""
        return compile(command[1], "<string>", "exec"), main.__dict__
    sys.argv = command
    main.__file__ = command[0]
    sys.path[0] = os.path.dirname(command[0])
    with open(command[0], "rb") as file:
        return compile(file.read(), command[0], "exec"), main.__dict__


if __name__ == "__main__":
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    torch = sys.modules["torch"]
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()
    exec(*program_of(request["command"]))
