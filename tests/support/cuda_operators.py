"""Write docs/cuda_operators.md: PyTorch's operators for CUDA alone, and foo's support.

python tests/support/cuda_operators.py
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torchgen
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey

from foo_ops import _C
from foo_ops.testing.conformance.cases import dtypes_of_cuda, name_of, op_db

PAGE = Path(__file__).parents[2] / "docs/cuda_operators.md"
YAML = Path(torchgen.__file__).parent / "packaged/ATen/native"
KINDS = ("", "NestedTensor", "Sparse", "SparseCsr", "Quantized")
WORDS = {"NestedTensor": "nested tensors", "SparseCsr": "sparse tensors in rows"}

HEAD = """# Operators of CUDA

PyTorch {version} has some operators, and some dtypes of operators, for CUDA and not for the CPU.
Code that is to run on a GPU later may use them, so foo has most. This page is written by
`tests/support/cuda_operators.py` from PyTorch's own lists, and a test compares it with what is
there.

## Operators

- **works**: foo has a kernel. It is made of foo's attention and products, or of other operators,
  and returns the shapes, strides and dtypes that PyTorch announces of CUDA's. Dropout draws from
  foo's generator.
- **composed**: PyTorch's own composition of smaller operators runs.
- **refused**: a NotImplementedError says what to use instead.

Where PyTorch has a formula for gradients, operators that work have gradients. Attention takes the
dtypes that it takes on CUDA: flash and cuDNN's in float16 and bfloat16, efficient attention in
float32, too.

| operator | foo | instead |
|---|---|---|
"""

DTYPES = """
## Dtypes

These operators compute in a wider dtype, on copies, and round once: complex32 in complex64,
float16 and bfloat16 in float32, bool in uint8. Results have the dtype that they have on CUDA, in
every variant (`out=`, in place). `histc` of integers counts exactly, also beyond 2^53, where
float64 would not; its counts have the dtype of the input and wrap around in it, as on CUDA.
`nansum` of complex numbers leaves out those with a NaN in either part. `make conformance`
compares all of them with the CPU in float64. Convolutions of complex32 are made of those of
float16.

| dtypes | operators |
|---|---|
"""


class CudaOperator(NamedTuple):
    """An operator with its overload, and the kind of tensors for which only CUDA has a kernel."""

    name: str
    kind: str

    def status(self) -> str:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        name = f"aten::{self.name}"
        if has_kernel(name, f"{self.kind}PrivateUse1"):
            return "works"
        return "composed" if self.kind == "" and has_composite(name) else "refused"

    def instead(self) -> str:
        return _C.device.instead_of(f"aten::{self.name}") if self.status() == "refused" else ""


def has_composite(name: str) -> bool:
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Composite{each}")
        for each in ("ImplicitAutograd", "ExplicitAutograd", "ExplicitAutogradNonFunctional")
    )


def operators() -> Iterator[CudaOperator]:
    parsed = parse_native_yaml(str(YAML / "native_functions.yaml"), str(YAML / "tags.yaml"))
    for function in parsed.native_functions:
        name = str(function.func.name)
        for kind in KINDS:
            key = DispatchKey.parse(f"{kind}CUDA")
            on_cuda = key in parsed.backend_indices and parsed.backend_indices[key].has_kernel(
                function
            )
            if on_cuda and not torch._C._dispatch_has_kernel_for_dispatch_key(
                f"aten::{name}", f"{kind}CPU"
            ):
                yield CudaOperator(name, kind)


def rows() -> list[tuple[str, str, str]]:
    """Return name, status and advice; overloads of one status share a row."""
    overloads: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for each in sorted(operators()):
        base, _, overload = each.name.partition(".")
        if base.startswith("_foreach_"):
            base, overload = "_foreach_*", ""
        kind = f" of {WORDS[each.kind]}" if each.kind else ""
        overloads[f"`{base}`{kind}", each.status(), each.instead()].append(overload)
    result = []
    for (name, status, instead), names in overloads.items():
        named = ", ".join(f"`.{each}`" for each in dict.fromkeys(names) if each)
        which = f" ({named})" if named and "" not in names else ""
        result.append((name + which, status, instead))
    return result


def dtypes() -> dict[str, list[str]]:
    result: dict[str, list[str]] = defaultdict(list)
    for op in op_db:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes_of_cuda(op))
        if names:
            result[names].append(f"`{name_of(op)}`")
    return dict(sorted(result.items()))


def page() -> str:
    lines = [f"| {name} | {status} | {instead} |\n" for name, status, instead in rows()]
    dtype_lines = [f"| {names} | {', '.join(each)} |\n" for names, each in dtypes().items()]
    version = ".".join(torch.__version__.split(".")[:2])
    return HEAD.format(version=version) + "".join(lines) + DTYPES + "".join(dtype_lines)


if __name__ == "__main__":
    PAGE.write_text(page())
