"""Tests run programs in forks of a server as they would run in new interpreters."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import processes
from support.processes import module, python, start


@pytest.mark.parametrize("new", [False, True], ids=["fork", "new"])
def test_as_a_shell_starts_it(new, tmp_path):
    program = """
import os, sys
print(sys.argv, sys.path[0], __name__, os.getcwd(), os.environ["FOO_VARIABLE"], input())
print("logged", file=sys.stderr)
from support import processes
sys.exit(3)
"""
    options = {"folder": tmp_path, "input": "said\n", "FOO_VARIABLE": "ä", "new": new}
    process = python(program, "first", 2, **options)
    assert process.stdout == f"['-c', 'first', '2']  __main__ {tmp_path} ä said\n"
    assert (process.returncode, process.stderr) == (3, "logged\n")


@pytest.mark.parametrize("new", [False, True], ids=["fork", "new"])
def test_files_and_modules(new, tmp_path):
    (tmp_path / "beside.py").write_text("import sys\nprint('beside', __name__, sys.argv[1:])")
    file = tmp_path / "program.py"
    file.write_text("import sys, beside\nprint(sys.argv, __file__)\nraise ValueError('ä')")
    process = python(file, 1, new=new)
    assert process.stdout == f"beside beside ['1']\n{[str(file), '1']} {file}\n"
    assert process.returncode == 1
    assert f'File "{file}", line 3, in <module>\n' in process.stderr
    assert process.stderr.endswith("\nValueError: ä\n")
    process = python(module("beside"), 1, folder=tmp_path, new=new)
    assert process.stdout == "beside __main__ ['1']\n"


def test_a_fork_has_torch_and_nothing_that_others_did():
    program = """
import sys, threading
print("torch" in sys.modules, "numba" in sys.modules, "foo_ops.ops" in sys.modules)
print([path for path in sys.path if path.endswith("support")], threading.active_count())
import torch
print(torch.foo.is_initialized(), torch.initial_seed())
torch.manual_seed(7)
torch.ops.foo.abs(torch.ones(3, device="foo"))
"""
    first, second = python(program), python(program)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.startswith("True False False\n[] 1\nFalse ")
    assert first.stdout == second.stdout


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "True True"),
        # Torch or one of its libraries has read this variable already: a new interpreter gets it.
        ({"OMP_NUM_THREADS": "3"}, "False False"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "True False"),
        # Inductor sets it in a process that has compiled.
        ({"TORCHINDUCTOR_CACHE_DIR": "/nowhere"}, "True True"),
    ],
    ids=str,
)
def test_variables(environment, expected):
    program = "import sys; print(*(it in sys.modules for it in ('torch', 'foo_ops')))"
    assert python(program, **environment).stdout.strip() == expected


def test_variables_of_this_process(monkeypatch):
    """Libraries set some at import or at use; programs must not depend on earlier tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("FOO_VARIABLE", "3")
    monkeypatch.delenv("PATH")
    program = """
import os, sys
print("torch" in sys.modules, *map(os.environ.get, ("OMP_NUM_THREADS", "FOO_VARIABLE", "PATH")))
"""
    expected = ("OMP_NUM_THREADS", "FOO_VARIABLE", "PATH")
    expected = " ".join(["True", *(str(processes.ENVIRONMENT.get(name)) for name in expected)])
    assert python(program).stdout.strip() == expected


def test_packages_that_a_path_has(tmp_path):
    package = tmp_path / "there" / "foo_ops"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("print('another')")
    environment = {"PYTHONPATH": str(package.parent), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    process = python("import foo_ops, support", folder=tmp_path, **environment)
    assert process.stdout == "another\n"
    assert "No module named 'support'" in process.stderr
    program = "import sys; print(sys.path)"
    assert python(program, **environment).stdout == python(program, new=True, **environment).stdout


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_a_signal(name):
    process = start("import time; print('here', flush=True); time.sleep(600)")
    os.kill(process.pid, signal.Signals[name])
    assert process.wait().returncode == -signal.Signals[name]


def test_a_limit_of_time_ends_all():
    """The processes that a program has started end, too."""
    program = """
import os, time
os.fork()
print(os.getpid(), flush=True)
time.sleep(600)
"""
    begin = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as late:
        python(program, seconds=3)
    assert time.monotonic() - begin < 300
    assert_gone(late.value.output)


def test_children_that_are_left():
    program = """
import os, time
child = os.fork()
if child == 0:
    time.sleep(600)
print(child)
"""
    process = python(program, seconds=60)
    assert process.returncode == 0
    assert_gone(process.stdout)


def assert_gone(printed):
    pids = [Path("/proc", pid) for pid in printed.split()]
    assert pids
    end = time.monotonic() + 60
    while any(map(Path.exists, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(Path.exists, pids))


def test_much_output():
    process = python("import sys; print('x' * 10**7); print('y' * 10**7, file=sys.stderr)")
    assert (len(process.stdout), len(process.stderr)) == (10**7 + 1, 10**7 + 1)


def test_programs_at_once():
    """Each wait returns for its own program, in any order."""
    waiting = start("input(); print('first')", input="\n" * 10)
    codes = [start(f"import time; time.sleep({1 - n / 4}); exit({n})") for n in range(4)]
    assert [it.wait().returncode for it in reversed(codes)] == [3, 2, 1, 0]
    assert waiting.wait().stdout == "first\n"


def test_a_server_that_ends():
    """The server's programs are lost, and the next program starts another server."""
    programs = [start("import time; time.sleep(60)") for _ in range(2)]
    server, _ = processes.start_server()
    server.kill()
    server.wait()
    begin = time.monotonic()
    for program in programs:
        with pytest.raises(AssertionError, match=r"^the server of forks has ended"):
            program.wait()
        os.kill(program.pid, signal.SIGKILL)
    # One program's wait does not last until the other ends.
    assert time.monotonic() - begin < 30
    assert python("print(1)").stdout == "1\n"
    assert processes.start_server()[0].pid != server.pid


def test_tests_that_end(tmp_path):
    """At the end of the tests, their server and all running programs end."""
    program = """
import os
from support import processes
running = processes.start("import time; time.sleep(600)")
print(running.pid, processes.start_server()[0].pid, flush=True)
if os.environ["FOO_END"] == "killed":
    os.kill(os.getpid(), 9)
"""
    for end in ("killed", "ends"):
        process = python(program, FOO_END=end, TMPDIR=str(tmp_path))
        assert process.returncode == (-9 if end == "killed" else 0), process.stderr
        assert_gone(process.stdout)
    # A killed process leaves its server's program file.
    assert len(list(tmp_path.iterdir())) == 1
