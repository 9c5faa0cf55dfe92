"""Trace the functions that a user gives flex_attention: from Python to the texts of programs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foo_ops.compat import (
    DisableAutocast,
    DisableFuncTorch,
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    is_functorch_wrapped_tensor,
    len_dispatch_stack_pre_dispatch,
    pytree,
    saved_tensors_hooks_are_enabled,
)
from foo_ops.kernels.flex.program import Gradient
from foo_ops.ops.flex_attention.programs import (
    Builder,
    Load,
    Number,
    Recorder,
    RefusalError,
    Texts,
    name_of,
    unsupported,
    wide,
)

# ------------------------------------------------------------------------------------------ reading

# Intercept what a function reads, before PyTorch does.


# Methods that pass a tensor's values to Python without an operation.
READERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class Reader(TorchFunctionMode):
    """Intercepts the tensors that a function reads, before PyTorch unwraps them.

    Beside numbers without values, captured tensors are replaced by stand-ins. ``tensor[number]``
    becomes an operation, where PyTorch would read the number's value.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function: beside numbers with stand-ins, on wrapped tensors outside the trace."""
        if func in READERS:
            self._recorder.reads_values = True
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            items = list(index) if isinstance(index, tuple) else [index]
            if any(isinstance(it, Tensor) for it in items):
                return self._indexed(tensor, items)
        return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [it for it in pytree.tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
        if any(isinstance(it, Number) for it in tensors):
            args, kwargs = pytree.tree_map_only(Tensor, self._recorder.stand_in, (args, kwargs))
        elif any(map(self._is_of_others, tensors)):
            return self._recorder.outside(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _is_of_others(self, tensor: Tensor) -> bool:
        """Whether torch.func or torch.export has to see operations on a tensor."""
        if len_dispatch_stack_pre_dispatch():
            return id(tensor) not in self._recorder.created
        return is_functorch_wrapped_tensor(tensor)

    def _indexed(self, tensor: Tensor, items: list[Any]) -> Any:
        """Return an element or a part; slices are taken first, as they are equal for all scores."""
        if Ellipsis in (it for it in items if not isinstance(it, Tensor)):
            place = next(i for i, it in enumerate(items) if it is Ellipsis)
            items[place : place + 1] = [slice(None)] * (tensor.dim() - len(items) + 1)
        for item in items:
            if isinstance(item, bool) or not isinstance(item, (Tensor, int, slice)):
                raise unsupported(f"an index that is {type(item).__name__}")
            if isinstance(item, Tensor) and (item.dim() or item.dtype in (torch.bool, torch.uint8)):
                raise unsupported(f"an index of {name_of(item.dtype)} and shape {list(item.shape)}")
        slices = tuple(it if isinstance(it, slice) else slice(None) for it in items)
        if any(it != slice(None) for it in slices):
            tensor = self._call(torch.Tensor.__getitem__, (tensor, slices), {})
        return self._call(torch.ops.aten.index, (tensor, list(_indices(items, tensor.device))), {})


def _indices(items: list[Any], device: torch.device) -> Iterator[Tensor | None]:
    for item in items:
        if isinstance(item, slice):
            yield None
        else:
            yield item if isinstance(item, Tensor) else torch.tensor(item, device=device)


# ------------------------------------------------------------------------------------------ tracing


Function = Callable[..., Any]
Output = tuple[int, list[Gradient]]
_OURS = (
    *(str(Path(torch.__file__).parent), str(Path(__file__).parent)),
    *(contextlib.__file__, inspect.__file__),
)
INDICES = ("batch", "head", "query", "key")


@dataclasses.dataclass(frozen=True)
class Traced:
    """Programs of one call, and the values that they read.

    Attributes:
        score_mod: the program of the score, or "" if the score does not change.
        mask_mod: the program of the mask, or "" if nothing is masked.
        backward: the program of the gradients of the score and of captured tensors, or "" if the
            gradient of the result is that of the score.
        captured: the tensors that the programs load from.
        numbers: the floating-point numbers in the functions.
        integers: the integers in the functions.
    """

    score_mod: str = ""
    mask_mod: str = ""
    backward: str = ""
    captured: list[Tensor] = dataclasses.field(default_factory=list)
    numbers: list[float] = dataclasses.field(default_factory=list)
    integers: list[int] = dataclasses.field(default_factory=list)


def trace(score_mod: Function | None, mask_mod: Function | None, query: Tensor) -> Traced:
    """Return the programs of a score_mod and a mask_mod, for a query's dtype and device."""
    return record(score_mod, mask_mod, query)[0]


def record(
    score_mod: Function | None, mask_mod: Function | None, query: Tensor
) -> tuple[Traced, Recorder]:
    """Trace, and return the recorder, too."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    recorder = Recorder(Builder(), query.device)
    tracer = _Tracer(recorder, dtype)
    outputs: dict[str, Output] = {}
    with _nothing_around():
        if score_mod is not None:
            outputs |= tracer.score_mod(score_mod)
        if mask_mod is not None:
            outputs |= tracer.mask_mod(mask_mod)
    texts = Texts(recorder.builder)
    programs = {name: texts.write(*output) for name, output in outputs.items()}
    captured = [recorder.captured[it] for it in texts.captured]
    return Traced(
        **programs, captured=captured, numbers=texts.numbers, integers=texts.integers
    ), recorder


class _Tracer:
    """Run functions on numbers without values."""

    def __init__(self, recorder: Recorder, dtype: torch.dtype) -> None:
        self.recorder, self.builder = recorder, recorder.builder
        self._dtype = dtype

    def _indices(self) -> list[Tensor]:
        return [self.recorder.input(name, torch.int32) for name in INDICES]

    def score_mod(self, function: Function) -> dict[str, Output]:
        """Return the outputs of the function's program and of its gradients' program."""
        score = self.recorder.input("score", self._dtype, torch.is_grad_enabled())
        unchanged = self.recorder.operand(score, self._dtype)
        with self.recorder:
            # Not a leaf: autograd would refuse in-place writes to a leaf before we can.
            given = score.clone()
        result = self._run("score_mod", function, (given, *self._indices()), self._dtype)
        node = self.recorder.operand(result, self._dtype)
        outputs: dict[str, Output] = {} if node == unchanged else {"score_mod": (node, [])}
        if torch.is_grad_enabled():
            with _refusals("score_mod", function):
                outputs |= self._backward(result, score)
        return outputs

    def mask_mod(self, function: Function) -> dict[str, Output]:
        """Return the output of the function's program."""
        result = self._run("mask_mod", function, tuple(self._indices()), torch.bool)
        node = self.recorder.operand(result, torch.bool)
        return {} if self.builder.value_of(node) == 1 else {"mask_mod": (node, [])}

    def _run(
        self, kind: str, function: Function, inputs: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        """Return the number that the function returns."""
        names = INDICES if kind == "mask_mod" else ("score", *INDICES)
        with _refusals(kind, function):
            _check_parameters(function, names)
            with self.recorder, Reader(self.recorder):
                result = function(*inputs)
            if not isinstance(result, Tensor):
                raise RefusalError("must return a tensor", type(result).__name__, TypeError)
            if result.numel() != 1:
                got = f"shape {list(result.shape)}"
                raise RefusalError("must return one number", got, ValueError)
            with self.recorder:
                number: Tensor = self.recorder.stand_in(result).to(dtype).reshape(())
                return number

    def _backward(self, result: Tensor, score: Tensor) -> dict[str, Output]:
        """Return the gradients of the score and of loads, unless ``grad`` passes unchanged."""
        zero = self.builder.constant(0, self._dtype)
        if not result.requires_grad:
            return {"backward": (zero, [])}
        loads = [it for it in self.recorder.loads if it.tensor.requires_grad]
        grad = self.recorder.input("grad", self._dtype)
        unchanged = self.recorder.operand(grad, self._dtype)
        self.recorder.may_write = True
        inputs = [score, *(it.tensor for it in loads)]
        with self.recorder:
            # A product: with grad as argument grad_outputs, autograd would import sympy, for 0.3 s.
            grads = torch.autograd.grad(result * grad, inputs, allow_unused=True)
        first, *rest = grads
        output = zero if first is None else self.recorder.operand(first, self._dtype)
        gradients = self._gradients(zip(loads, rest, strict=True))
        self.recorder.may_write = False
        return {} if output == unchanged and not gradients else {"backward": (output, gradients)}

    def _gradients(self, pairs: Iterable[tuple[Load, Tensor | None]]) -> list[Gradient]:
        """Return one gradient per loaded element, however often it was loaded."""
        sums: dict[int, int] = {}
        for load, grad in pairs:
            if grad is not None:
                dtype = wide(load.tensor.dtype)
                value = self.recorder.operand(grad, dtype)
                known = sums.get(load.node)
                both = value if known is None else self.builder.add(dtype, "add", known, value)
                sums[load.node] = both
        nodes = self.builder.nodes
        return [
            Gradient(nodes[load].operands[0], value, nodes[load].arguments)
            for load, value in sums.items()
        ]


@contextlib.contextmanager
def _nothing_around() -> Iterator[None]:
    """Make a trace the same within autocast, checkpoints, transforms and exports."""
    pre_dispatch = DispatchKeySet(DispatchKey.PreDispatch)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ExcludeDispatchKeyGuard(pre_dispatch))
        stack.enter_context(DisableFuncTorch())
        stack.enter_context(DisableAutocast())
        if saved_tensors_hooks_are_enabled():
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda it: it, lambda it: it)
            stack.enter_context(hooks)
        yield


@contextlib.contextmanager
def _refusals(kind: str, function: Function) -> Iterator[None]:
    """Name the function, and the line that could not be compiled, in a refusal."""
    try:
        yield
    except RefusalError as error:
        where = f"{kind} {_name(function)!r} ({_place(function, error.__traceback__)})"
        raise error.kind(f"flex_attention: {where} {error.must}, got {error.got}") from None


def _check_parameters(function: Function, names: tuple[str, ...]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(*names)
    except TypeError:
        must = f"must take {len(names)} arguments ({', '.join(names)})"
        raise RefusalError(must, str(signature), TypeError) from None


def _name(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _place(function: Function, traceback: TracebackType | None) -> str:
    """Return the user's last line in a traceback, or else the function's first line."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "no file"
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(_OURS):
            place = f"{file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
