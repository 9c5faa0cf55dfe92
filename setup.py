"""Builds the C++ companion foo_ops._C, for the torch that is installed, and says what is installed
under which name.

Everything else is in pyproject.toml.
"""

import os
import sys
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


class IncrementalBuildExtension(BuildExtension):
    """Keeps its object files, under ``pip install -e`` too: ninja then rebuilds what changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = "build/objects"

    def run(self) -> None:
        super().run()
        # foo_ops/_autoload.py compares it before the companion is loaded.
        built_for = Path(self.get_ext_fullpath("foo_ops._C")).parent / "_built_for.py"
        built_for.write_text(f'TORCH = "{TORCH}"\n')


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
            sources=sorted(str(path) for path in SOURCE_FOLDER.rglob("*.cpp")),
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
    cmdclass={"build_ext": IncrementalBuildExtension, "egg_info": EggInfo},
)
