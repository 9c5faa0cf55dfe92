"""Test kernels for other processors, as far as this one runs them: ``make test-processors``.

    python tests/processors.py [--only NAME ...] [--part K/N] [--list]

For each vector width, kernels are tested as they are by default, with bfloat16 multiplied in pairs,
and with the tiles of a matrix unit, which are emulated where there is none. (With a matrix unit,
pairs make no difference.) Then for other processors by name, except those whose instructions this
one lacks. The tests compute values and gradients of all operators, and the functions and products
that their kernels are built from.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm
from support.parts import part, part_of

REPOSITORY = Path(__file__).parents[1]
FILES = (
    "tests/operators/test_matrix.py",
    "tests/operators/flex/test_variants.py",
    "tests/library/test_elementwise.py",
    "tests/library/test_math_functions.py",
    "tests/library/test_division.py",
    "tests/library/test_products.py",
    "tests/products/test_on_amx.py",
    "tests/products/test_bytes_on_amx.py",
    "tests/products/test_limbs.py",
)
PRODUCTS = ("float32", "bfloat16", "float16")
ALL = (*PRODUCTS, "float64")
# Products of tiles, in float32, bfloat16 and all integers that are not multiplied one by one.
TILES = ("test_strides", "test_integers")
# Scores of columns that only pad a product.
PADDING = "poisoned_zeros-torch."
# Functions, limbs, and products in limbs, from which kernels are built.
VOCABULARY = (
    *("test_exp", "test_tanh", "test_log", "test_bounds", "test_fmod", "test_quotients"),
    *("on_amx", "test_limbs"),
)
SHOWN_LINES = 100
"""Lines of pytest's output to show on failure: of hundreds of equal failures, some suffice."""
HAS_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
HAS_AVX2 = ("avx", "avx2", "fma", "f16c")


@dataclass(frozen=True)
class Combination:
    """A run of the kernel tests: its dtypes and environment variables."""

    name: str
    dtypes: tuple[str, ...]
    environment: Mapping[str, str]
    vocabulary: bool = False

    def chosen(self) -> str:
        """Return the tests as an expression for pytest's option -k."""
        words = [f"cpu-{it}-{check}" for it in self.dtypes for check in ("values", "gradients")]
        words += [f"{PADDING}{it}" for it in self.dtypes if it != "float64"]
        return " or ".join([*words, *TILES, *(VOCABULARY if self.vocabulary else ())])


@dataclass(frozen=True)
class Processor:
    """Another processor, by its name in LLVM.

    Attributes:
        name: LLVM's name of the processor.
        needs: features without which none of its code is tested.
        others: features that its code is compiled without if this processor lacks them.
        dtypes: the dtypes to test. Without F16C, LLVM calls missing functions for float16.
    """

    name: str
    needs: tuple[str, ...]
    others: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def missing(self, features: Mapping[str, bool]) -> list[str]:
        return [name for name in self.needs if not features.get(name)]

    def combination(self, features: Mapping[str, bool]) -> Combination:
        lacking = [name for name in self.others if not features.get(name)]
        present = [name for name in self.others if features.get(name)]
        switches = [f"+{name}" for name in (*self.needs, *present)]
        switches += [f"-{name}" for name in (*lacking, "prefer-256-bit")]
        environment = {"NUMBA_CPU_NAME": self.name, "NUMBA_CPU_FEATURES": ",".join(switches)}
        without = f" without {', '.join(lacking)}" if lacking else ""
        return Combination(self.name + without, self.dtypes, environment)


PROCESSORS = (
    Processor("x86-64", (), dtypes=("float32", "float64")),
    Processor("haswell", HAS_AVX2, dtypes=PRODUCTS),
    Processor("skylake-avx512", (*HAS_AVX2, *HAS_AVX512)),
    Processor(
        "sapphirerapids",
        (*HAS_AVX2, *HAS_AVX512, "avx512bf16"),
        ("avx512fp16", "avxvnni", "amx-tile", "amx-bf16", "amx-int8"),
    ),
    Processor(
        "znver5", (*HAS_AVX2, *HAS_AVX512, "avx512bf16"), ("avxvnni", "avx512vp2intersect")
    ),
)  # fmt: skip


def widths() -> Iterator[Combination]:
    """Combine all vector widths with each way to multiply."""
    for bits in ("128", "256", "512"):
        for name, dtypes, pairs, unit in (
            (f"{bits} bits", ALL, "0", "0"),
            (f"{bits} bits in pairs", ("bfloat16",), "1", "0"),
            (f"{bits} bits on a matrix unit", PRODUCTS, "0", "1"),
        ):
            environment = {
                "FOO_VECTOR_BITS": bits,
                "FOO_BFLOAT16_PAIRS": pairs,
                "FOO_MATRIX_UNIT": unit,
            }
            yield Combination(name, dtypes, environment, vocabulary=dtypes == ALL)


def combinations() -> tuple[list[Combination], list[str]]:
    """Return the combinations that run here, and the reason for each processor that does not."""
    found, skipped = list(widths()), []
    is_x86 = llvm.get_process_triple().startswith("x86_64")
    features = llvm.get_host_cpu_features()
    for processor in PROCESSORS:
        if not is_x86:
            skipped.append(f"{processor.name}: skipped, this processor is no x86-64")
        elif missing := processor.missing(features):
            skipped.append(f"{processor.name}: skipped, this processor has no {', '.join(missing)}")
        else:
            found.append(processor.combination(features))
    return found, skipped


def run(combination: Combination) -> tuple[bool, str]:
    """Return whether all tests passed, and a summary to print."""
    start = time.monotonic()
    process = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            # With the project's own options, pytest would not print how many passed.
            *("-o", "addopts=--strict-markers --import-mode=importlib", "-q", "--tb=short"),
            "--whole",
            *FILES,
            *("-k", combination.chosen()),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **combination.environment},
        check=False,
    )
    output, seconds = process.stdout, time.monotonic() - start
    line = f"{combination.name}: {summary(process.returncode, output)} in {seconds:.0f} s"
    if process.returncode == 0:
        return True, line
    settings = " ".join(f"{name}={value}" for name, value in combination.environment.items())
    last = (output + process.stderr).splitlines()[-SHOWN_LINES:]
    return False, "\n".join([f"{line} ({settings})", *last])


def summary(returncode: int, output: str) -> str:
    """Return how many tests passed and failed."""
    if returncode < 0:
        return f"ended by signal {-returncode}"
    *_, last = ["", *output.splitlines()]
    counts = re.findall(r"(\d+ (?:passed|failed|errors?))\b", last)
    return ", ".join(counts) or f"pytest returned {returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="only the names of the combinations")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the combinations")
    parser.add_argument("--part", type=part, metavar="K/N", help="the Kth of N parts, from 1")
    options = parser.parse_args()
    chosen, skipped = combinations()
    if options.only:
        names = [it.name for it in chosen]
        if unknown := [name for name in options.only if name not in names]:
            parser.error(f"--only must be among {'; '.join(names)}, got {'; '.join(unknown)}")
        chosen, skipped = [it for it in chosen if it.name in options.only], []
    if options.part:
        chosen = list(part_of(chosen, options.part))
    if options.list:
        print(*(it.name for it in chosen), *skipped, sep="\n")
        return 0
    right = True
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for passed, text in pool.map(run, chosen):
            print(text, flush=True)
            right = right and passed
    print(*skipped, sep="\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
