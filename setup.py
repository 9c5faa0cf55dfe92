"""Builds the C++ companion foo_ops._C and says what is installed under which name.

Everything else is in pyproject.toml.
"""

import os
from pathlib import Path

from setuptools import find_namespace_packages, setup

# An earlier build that no longer loads must not keep torch, and so this build, from starting.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCE_FOLDER = Path("foo_ops/csrc")
PLUGIN = "foo_ops.testing.pytest_plugin"


class IncrementalBuildExtension(BuildExtension):
    """Keeps its object files, under ``pip install -e`` too: ninja then rebuilds what changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = "build/objects"


setup(
    # Outside of foo_ops, whose import is that of torch, so that a run of pytest can do without.
    packages=[*find_namespace_packages(include=["foo_ops*"], exclude=[PLUGIN]), "pytest_foo_ops"],
    package_dir={"pytest_foo_ops": PLUGIN.replace(".", "/")},
    ext_modules=[
        CppExtension(
            name="foo_ops._C",
            sources=sorted(str(path) for path in SOURCE_FOLDER.rglob("*.cpp")),
            include_dirs=[str(SOURCE_FOLDER.resolve())],
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
    cmdclass={"build_ext": IncrementalBuildExtension},
)
