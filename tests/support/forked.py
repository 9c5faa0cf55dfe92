"""Tries ways of doing something for the first time, each in a fork of this process.

torch is imported only once, and no way sees the state that another one leaves.
"""

import os
import signal
import threading
import traceback


def succeeds(way):
    """Run ``way`` in a child process, which must end in time."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            way()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def failures(ways):
    """Return the names of the ways that raise; the errors go to standard error."""
    return [way.__name__ for way in ways if not succeeds(way)]


def in_threads(*functions):
    """Call the functions at once, eight calls in eight threads."""
    barrier, errors = threading.Barrier(8), []

    def run(function):
        barrier.wait()
        try:
            function()
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [
        threading.Thread(target=run, args=(functions[i % len(functions)],)) for i in range(8)
    ]
    for it in threads:
        it.start()
    for it in threads:
        it.join()
    assert not errors, errors[0]
