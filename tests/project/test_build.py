"""A build takes the extension from a wheel of equal sources, and compiles it otherwise."""

import re
import runpy
import shutil
import types
import zipfile
from pathlib import Path

import foo_ops._C
import pytest
import setuptools
from torch.utils import cpp_extension

REPOSITORY = Path(__file__).parents[2]
COMPANION = Path(foo_ops._C.__file__)
SOURCE = "foo_ops/csrc/launch/overlap.cpp"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Change to a folder with the files that a build reads."""
    shutil.copy(REPOSITORY / "setup.py", tmp_path)
    shutil.copytree(REPOSITORY / "foo_ops/csrc", tmp_path / "foo_ops/csrc")
    (tmp_path / "build/dist").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def setup(tree, monkeypatch):
    """Provide the names in setup.py, and as ``arguments`` those of ``setuptools.setup``."""
    arguments = {}
    monkeypatch.setattr(setuptools, "setup", arguments.update)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    names = runpy.run_path("setup.py")
    return types.SimpleNamespace(**names, arguments=arguments)


@pytest.fixture
def build(setup, monkeypatch):
    """Provide a build in the source folder, which returns the sources that it would compile."""

    def build():
        compiled = []
        monkeypatch.setattr(
            cpp_extension.BuildExtension,
            "run",
            lambda command: compiled.extend(command.extensions[0].sources),
            raising=False,
        )
        distribution = setuptools.Distribution({"name": "foo_ops", **setup.arguments})
        command = distribution.get_command_obj("build_ext")
        command.inplace = True
        command.ensure_finalized()
        command.run()
        return compiled

    return build


def put_into_wheel(built_for, companion=COMPANION):
    with zipfile.ZipFile("build/dist/foo_ops-0-any.whl", "w") as wheel:
        if built_for is not None:
            wheel.writestr("foo_ops/_built_for.py", built_for)
        wheel.write(companion, f"foo_ops/{COMPANION.name}")


@pytest.fixture
def built_for(build):
    """Build without a wheel, and return the text of foo_ops/_built_for.py."""
    assert build()
    return Path("foo_ops/_built_for.py").read_text()


def test_wheel_of_the_same_sources(build, built_for):
    put_into_wheel(built_for)
    assert build() == []
    assert Path("foo_ops", COMPANION.name).read_bytes() == COMPANION.read_bytes()
    assert Path("foo_ops/_built_for.py").read_text() == built_for


@pytest.mark.parametrize("changed", [SOURCE, "foo_ops/csrc/new.h", "setup.py"])
def test_wheel_of_other_sources(build, built_for, changed):
    put_into_wheel(built_for)
    with open(changed, "a") as file:
        file.write("\n")
    assert build()
    assert not Path("foo_ops", COMPANION.name).exists()
    assert Path("foo_ops/_built_for.py").read_text() != built_for


@pytest.mark.parametrize("change", ["torch", "python"])
def test_wheel_for_other_versions(setup, build, built_for, monkeypatch, change):
    put_into_wheel(built_for)
    if change == "torch":
        monkeypatch.setattr(setup.torch, "__version__", f"{setup.torch.__version__}.1")
    else:
        monkeypatch.setattr(setup.sysconfig, "get_config_var", lambda name: ".cpython-399.so")
    assert setup.compiled_from() not in built_for
    assert build()


@pytest.mark.parametrize("built_for", [None, 'TORCH = "2.13"\n'])
def test_wheel_that_does_not_say_what_it_is_from(build, built_for):
    put_into_wheel(built_for)
    assert build()


def test_wheel_that_does_not_load(build, built_for, tree):
    broken = tree / "broken.so"
    broken.write_bytes(COMPANION.read_bytes()[:4096])
    put_into_wheel(built_for, broken)
    assert build()


def test_units(setup):
    """Each source is in one unit, together with others of its folder."""
    units = [Path(unit) for unit in setup.write_units(setup.SOURCES)]
    times = [unit.stat().st_mtime_ns for unit in units]
    included = []
    for unit in units:
        names = re.findall(r'#include "(.*)"', unit.read_text())
        assert 1 <= len(names) <= setup.FILES_OF_A_UNIT
        assert len({Path(name).parent for name in names}) == 1
        included += names
    sources = setup.SOURCE_FOLDER.rglob("*.cpp")
    assert sorted(included) == sorted(str(path.relative_to("foo_ops/csrc")) for path in sources)
    assert len(set(units)) < len(included) / 4
    # Unchanged sources are not written again, so that nothing is recompiled.
    assert [Path(unit) for unit in setup.write_units(setup.SOURCES)] == units
    assert [unit.stat().st_mtime_ns for unit in units] == times
