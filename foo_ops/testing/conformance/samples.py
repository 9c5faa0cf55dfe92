"""PyTorch's table of operators, and their samples."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal import common_cuda

# op_db omits what this machine's GPU cannot do. It shall list everything that CUDA can, so that the
# cases do not depend on the machine.
for _name in list(vars(common_cuda)):
    if _name.startswith("PLATFORM_SUPPORTS_") or (
        _name.startswith("SM") and _name.endswith("OrLater")
    ):
        setattr(common_cuda, _name, True)

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

# Samples to run per operator and dtype, evenly chosen.
MAX_SAMPLES = 6


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPERATORS = {name_of(op): op for op in op_db}


def dtypes_of_cuda(op: Any) -> list[torch.dtype]:
    """Return the dtypes, forward or backward, that PyTorch lists for CUDA but not for the CPU."""
    forward = set(op.dtypesIfCUDA) - set(op.dtypes)
    backward = set(op.backward_dtypesIfCUDA) - set(op.backward_dtypes)
    return sorted(forward | backward, key=str)


def evenly(items: Iterator[Any], count: int = MAX_SAMPLES) -> list[Any]:
    first = list(itertools.islice(items, 200))
    return first[:: max(1, -(-len(first) // count))]


def call_of(op: Any, sample: Any, **options: Any) -> Callable[[], Any]:
    return lambda: op(sample.input, *sample.args, **sample.kwargs, **options)


def leaves_of(sample: Any) -> list[Any]:
    return tree_leaves((sample.input, sample.args, sample.kwargs))


def is_about_a_device(sample: Any) -> bool:
    """Return whether it contains a device or a tensor; torch.arange(3) always runs on the CPU."""
    kinds = (torch.Tensor, torch.device, torch.Generator)
    return any(isinstance(leaf, kinds) or leaf == "cpu" for leaf in leaves_of(sample))


def is_strided(sample: Any) -> bool:
    tensors = [leaf for leaf in leaves_of(sample) if isinstance(leaf, torch.Tensor)]
    return all(each.layout == torch.strided for each in tensors)


def inputs_with_gradient(sample: Any) -> list[torch.Tensor]:
    leaves = leaves_of(sample)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def differentiable(results: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in tree_leaves(results)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def weights_of(result: torch.Tensor) -> torch.Tensor:
    """Return weights for a gradient. They differ, as some gradients only show up in differences."""
    numbers = torch.linspace(0.5, 1.5, max(result.numel(), 1), dtype=torch.float64)
    return numbers[: result.numel()].view(result.shape).to(result.dtype).to(result.device)
