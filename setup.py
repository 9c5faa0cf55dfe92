"""Builds the C++ companion foo_ops._C, for the torch that is installed, and says what is installed
under which name.

Everything else is in pyproject.toml.
"""

import hashlib
import itertools
import math
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import setuptools
from setuptools.command.egg_info import egg_info

MODERN_SETUPTOOLS = 77
if int(setuptools.__version__.partition(".")[0]) < MODERN_SETUPTOOLS:
    sys.exit(
        f"foo_ops needs setuptools {MODERN_SETUPTOOLS} or newer to be built, "
        f"got {setuptools.__version__}: pip install --upgrade setuptools"
    )

# An earlier build that no longer loads must not keep torch, and so this build, from starting.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
try:
    import torch
except ModuleNotFoundError:
    sys.exit(
        "foo_ops is built for the torch that is installed, and there is none: "
        "pip install torch setuptools ninja, then pip install --no-build-isolation foo_ops"
    )
from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: E402

SOURCE_FOLDER = Path("foo_ops/csrc")
SOURCES = sorted(SOURCE_FOLDER.rglob("*.cpp"), key=lambda path: (path.parent, path))
BUILT_FOR = Path("foo_ops/_built_for.py")
# `make wheel` leaves wheels here.
WHEEL_FOLDER = Path("build/dist")
UNIT_FOLDER = Path("build/units")
# The compiler spends most of its time on torch's headers, so it gets several sources at once: all
# are built in two fifths of the time. A change of one compiles those of its unit.
FILES_OF_A_UNIT = 8
# torch's header for profilers of devices includes them without a folder.
KINETO_HEADERS = Path(torch.__file__).parent / "include" / "kineto"
# Packages outside of foo_ops, whose import is that of torch: pytest and torch import them at their
# own start, and go on where they cannot be loaded.
ENTRY_POINTS = {
    "pytest_foo_ops": "foo_ops/testing/pytest_plugin",
    "torch_foo_ops": "foo_ops/_entry_point",
}
WORKS_WITH = ("2.13", "2.14", "2.15")
# What was compiled for one minor version of torch does not load with another.
TORCH = ".".join(torch.__version__.split(".")[:2])
if TORCH not in WORKS_WITH:
    sys.exit(
        f"foo_ops works with torch {WORKS_WITH[0]} to {WORKS_WITH[-1]}, got {torch.__version__}"
    )


class EggInfo(egg_info):
    """Says for which torch a build is, and stays out of the source folder.

    There it would be found wherever that folder is on sys.path, and name the packages of
    ENTRY_POINTS, which are there under other names: `import torch` and pytest would fail.
    """

    def finalize_options(self) -> None:
        # A source distribution serves all of WORKS_WITH; the setup.cfg that it brings says that its
        # version has no tag.
        if "sdist" not in sys.argv:
            self.tag_build = f"+torch{TORCH}"
        if self.egg_base is None:
            self.egg_base = "build"
            Path(self.egg_base).mkdir(exist_ok=True)
        super().finalize_options()


class CompanionBuild(BuildExtension):
    """Compiles what has changed, or takes the companion from a wheel of the same sources."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # Object files are kept, under ``pip install -e`` too: ninja then rebuilds what changed.
        self.build_temp = "build/objects"

    def run(self) -> None:
        companion = Path(self.get_ext_fullpath("foo_ops._C"))
        # foo_ops/_autoload.py compares the torch before the companion is loaded.
        built_for = f'TORCH = "{TORCH}"\nCOMPILED_FROM = "{compiled_from()}"\n'
        wheels = WHEEL_FOLDER.glob("foo_ops-*.whl")
        if not any(take_companion(wheel, built_for, companion) for wheel in wheels):
            self.extensions[0].sources = write_units(SOURCES)
            super().run()
        (companion.parent / BUILT_FOR.name).write_text(built_for)


def write_units(sources: list[Path]) -> list[str]:
    """Write files that each include FILES_OF_A_UNIT sources of one folder at most."""
    UNIT_FOLDER.mkdir(parents=True, exist_ok=True)
    units = []
    for folder, paths in itertools.groupby(sources, key=lambda path: path.parent):
        names = [path.relative_to(SOURCE_FOLDER).as_posix() for path in paths]
        count = math.ceil(len(names) / FILES_OF_A_UNIT)
        for i in range(count):
            part = names[len(names) * i // count : len(names) * (i + 1) // count]
            text = "".join(f'#include "{name}"\n' for name in part)
            room = "_".join(folder.relative_to(SOURCE_FOLDER.parent).parts)
            unit = UNIT_FOLDER / f"{room}_{i}.cpp"
            # Its time stays where nothing changes, so that ninja compiles nothing.
            if not unit.exists() or unit.read_text() != text:
                unit.write_text(text)
            units.append(str(unit))
    return units


def compiled_from() -> str:
    """Return a hash of all that the companion is made from: sources, flags, torch and Python."""
    files = sorted(path for path in SOURCE_FOLDER.rglob("*") if path.suffix in (".cpp", ".h"))
    origin = [torch.__version__, torch.version.git_version, sysconfig.get_config_var("EXT_SUFFIX")]
    for path in (Path("setup.py"), *files):
        origin += [path.as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()]
    return hashlib.sha256("\n".join(map(str, origin)).encode()).hexdigest()


def take_companion(wheel: Path, built_for: str, companion: Path) -> bool:
    """Take the companion from a wheel if that was built for the same, and loads here."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if str(BUILT_FOR) not in names or archive.read(str(BUILT_FOR)).decode() != built_for:
            return False
        companion.parent.mkdir(parents=True, exist_ok=True)
        companion.unlink(missing_ok=True)  # Running processes keep the old one.
        companion.write_bytes(archive.read(f"foo_ops/{companion.name}"))
    # The C library may be older than that of the machine that made the wheel.
    program = "import sys, torch; torch.ops.load_library(sys.argv[1])"
    if subprocess.run([sys.executable, "-c", program, companion.resolve()]).returncode != 0:
        return False
    print(f"foo_ops._C comes from {wheel}, which was built from the same sources")
    return True


setuptools.setup(
    install_requires=[f"torch=={TORCH}.*", "numba>=0.68,<0.69", "numpy", "opt_einsum"],
    packages=[
        *setuptools.find_namespace_packages(
            include=["foo_ops*"],
            exclude=[folder.replace("/", ".") for folder in ENTRY_POINTS.values()],
        ),
        *ENTRY_POINTS,
    ],
    package_dir=ENTRY_POINTS,
    ext_modules=[
        CppExtension(
            name="foo_ops._C",
            sources=[str(path) for path in SOURCES],
            include_dirs=[str(SOURCE_FOLDER.resolve()), str(KINETO_HEADERS)],
            extra_compile_args=[
                "-std=c++20",
                "-O3",
                # Without it ATen/Parallel.h compiles to a serial loop.
                "-fopenmp",
                "-fvisibility=hidden",
                "-g0",
                "-Wall",
                "-Wno-unknown-pragmas",
            ],
            # torch brings the OpenMP runtime: both then share one pool of threads.
            extra_link_args=["-fopenmp", "-s"],
        )
    ],
    cmdclass={"build_ext": CompanionBuild, "egg_info": EggInfo},
)
