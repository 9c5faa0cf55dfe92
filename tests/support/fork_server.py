"""Fork processes that have imported torch: a new interpreter takes two seconds to get there.

Such a process has imported neither foo_ops nor Numba, started no thread and called no kernel.
"""

import json
import os
import signal
import sys


def serve():
    """Read a request per line and fork a process for it. Return in each, to run its program."""
    import torch

    # The processes between the server and a program need nobody who waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            program = os.fork()
            if program == 0:
                return become(torch, request)
            report_the_end(program, request["status"])
    os._exit(0)


def report_the_end(program, path):
    with open(path, "w") as status:
        print(program, file=status, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]), file=status, flush=True)
    os._exit(0)


def become(torch, request):
    """Become what ``python -c`` is after ``import torch``, and run the program."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    redirect(0, os.devnull, os.O_RDONLY)
    redirect(1, request["stdout"], os.O_WRONLY)
    redirect(2, request["stderr"], os.O_WRONLY)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = ["-c", *request["arguments"]]
    sys.path[0] = ""
    torch._import_device_backends()
    main = sys.modules["__main__"].__dict__
    del main["serve"]
    exec(compile(request["program"], "<string>", "exec"), main)


def redirect(descriptor, path, flags):
    file = os.open(path, flags)
    os.dup2(file, descriptor)
    os.close(file)
