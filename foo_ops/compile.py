"""``python -m foo_ops.compile`` compiles kernels ahead of time: for an image, or a fleet.

It calls the operators on the samples of their specs (foo_ops.testing), forward and backward, in the
dtypes that models have, and leaves what they need in the cache of kernels (FOO_CACHE_DIR).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

import torch

from foo_ops.kernels.compiler import cache
from foo_ops.testing import OPERATORS, OpSpec, cotangents_for
from foo_ops.testing.tolerance import gradients_of

DTYPES = ("float32", "bfloat16", "float16", "float64")


def main() -> None:
    """Compile the operators that the command line names, and print counts and times."""
    arguments = _parser().parse_args()
    if arguments.all == bool(arguments.operators):
        sys.exit(
            "foo_ops.compile: name operators or pass --all; the operators are "
            f"{', '.join(operators())}"
        )
    unknown = set(arguments.operators) - operators().keys()
    if unknown:
        sys.exit(
            f"foo_ops.compile: there is no operator {', '.join(sorted(unknown))}; the operators "
            f"are {', '.join(operators())}"
        )
    obstacle = cache.obstacle()
    if obstacle is not None:
        sys.exit(f"foo_ops.compile: compiled kernels are not kept, since {obstacle}")
    # Our own products are wanted, too, since they serve other shapes than the samples'.
    os.environ["FOO_TORCH_PRODUCTS"] = "0"
    folder = cache.cache_directory()
    assert folder is not None
    for name in arguments.operators or operators():
        before, start = _kept(folder), time.perf_counter()
        compile_operator(name, [getattr(torch, dtype) for dtype in arguments.dtypes])
        count, seconds = len(_kept(folder) - before), time.perf_counter() - start
        print(f"{name}: {count} kernels compiled in {seconds:.1f} s", flush=True)
    kept = [path.stat().st_size for path in _kept(folder)]
    print(f"{folder} has {len(kept)} kernels, {sum(kept) / 2**20:.1f} MB")


def operators() -> dict[str, list[OpSpec]]:
    """Return the specs of each operator; for ``abs`` also those of ``abs_`` and ``abs.out``."""
    found: dict[str, list[OpSpec]] = {}
    for spec in OPERATORS:
        name = spec.name.removeprefix("foo::").partition(".")[0].removesuffix("_")
        found.setdefault(name, []).append(spec)
    return found


def compile_operator(name: str, dtypes: list[torch.dtype]) -> None:
    """Call an operator, and its gradients, on all samples of its specs in some dtypes.

    Example:
        >>> from foo_ops.compile import compile_operator
        >>> compile_operator("silu_mul", [torch.float32])
    """
    with warnings.catch_warnings():
        # Some samples are empty, and some of torch's operators warn of that.
        warnings.simplefilter("ignore")
        for spec in operators()[name]:
            for dtype in dtypes:
                if dtype in spec.dtypes:
                    _call(spec, dtype)


def _call(spec: OpSpec, dtype: torch.dtype) -> None:
    for make_sample in spec.samples.values():
        sample = make_sample(dtype)
        spec.call(sample)
        if spec.differentiable:
            sample = sample.requiring_grad()
            outputs = spec.call(sample)
            gradients_of(outputs, sample.differentiable(), cotangents_for(outputs))


def _kept(folder: Path) -> set[Path]:
    return set(folder.glob("*.o"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m foo_ops.compile", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("operators", nargs="*", metavar="operator", help="names such as attention")
    parser.add_argument("--all", action="store_true", help="all operators")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=DTYPES,
        help="dtypes of the tensors; by default all",
    )
    return parser


if __name__ == "__main__":
    main()
