"""Capture operators of a stream as a graph, and replay it; graphs of functions and modules."""

import contextlib
import functools
import gc
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from foo_ops._C import device as _C
from foo_ops.compat import AcceleratorGraph, pytree
from foo_ops.device import _compiled_kernels, devices, memory, streams

# ------------------------------------------------------------------------------- capture and replay

# Capture the operators of a stream as a graph, and replay it.


PoolHandle = tuple[int, int]
CaptureErrorMode = Literal["default", "global", "thread_local", "relaxed"]


def is_current_stream_capturing() -> bool:
    """Return whether a graph captures the current stream.

    Example:
        >>> torch.foo.is_current_stream_capturing()
        False
    """
    return _C.is_current_stream_capturing()


def graph_pool_handle() -> PoolHandle:
    """Return the id of a new memory pool that graphs can share.

    Example:
        >>> pool = torch.foo.graph_pool_handle()
        >>> graphs = [torch.foo.FooGraph(), torch.foo.FooGraph()]
        >>> x = torch.ones(3, device="foo")
        >>> for graph in graphs:
        ...     with torch.foo.graph(graph, pool=pool):
        ...         y = x + 1
        >>> graphs[0].pool() == graphs[1].pool() == pool
        True
    """
    return _C.new_pool_id()


class FooGraph(AcceleratorGraph):
    """Operators captured from a stream, to be replayed with the same memory.

    The counterpart of ``torch.cuda.CUDAGraph``; ``torch.accelerator.Graph`` is the same with
    another interface. Operators run once during capture, since only that gives the shapes of their
    results. Afterwards earlier tensors get their old contents back, so the values of results mean
    nothing until the first replay.

    Args:
        keep_graph: Whether :meth:`instantiate`, or the first replay, makes it ready, rather than
            the end of the capture.

    Example:
        >>> x = torch.zeros(3, device="foo")
        >>> graph = torch.foo.FooGraph()
        >>> with torch.foo.graph(graph):
        ...     y = x * 2
        >>> x.fill_(4)
        tensor([4., 4., 4.], device='foo:0')
        >>> graph.replay()
        >>> y
        tensor([8., 8., 8.], device='foo:0')
    """

    def __new__(cls, keep_graph: bool = False) -> "FooGraph":
        return super().__new__(cls, keep_graph)

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph)

    def capture_begin(
        self,
        pool: PoolHandle | None = None,
        capture_error_mode: CaptureErrorMode = "global",
    ) -> None:
        """Begin to capture the current stream, which must not be the default one.

        Args:
            pool: The pool of another graph, or of :func:`graph_pool_handle`; None for a new one.
            capture_error_mode: As for a ``CUDAGraph``. On foo all modes reject the same calls.
        """
        super().capture_begin(pool=pool, capture_error_mode=capture_error_mode)

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Do nothing, since replays continue from the current state of each generator of foo.

        Args:
            generator: A generator that operators of the graph use.
        """


class graph(contextlib.AbstractContextManager[None]):  # noqa: N801
    """Captures the operators inside of ``with``.

    Args:
        foo_graph: The graph that captures.
        pool: The pool of another graph, or of :func:`graph_pool_handle`; None for a new one.
        stream: The stream to capture, which is the current one inside; None for a stream of its
            own.
        capture_error_mode: As for a ``CUDAGraph``. On foo all modes reject the same calls.

    Example:
        >>> total = torch.zeros((), device="foo")
        >>> graph = torch.foo.FooGraph()
        >>> with torch.foo.graph(graph):
        ...     total += 1
        >>> for _ in range(3):
        ...     graph.replay()
        >>> total.item()
        3.0
    """

    default_capture_streams: ClassVar[dict[int, torch.Stream]] = {}

    def __init__(
        self,
        foo_graph: FooGraph,
        pool: PoolHandle | None = None,
        stream: torch.Stream | None = None,
        capture_error_mode: CaptureErrorMode = "global",
    ) -> None:
        self.foo_graph = foo_graph
        self.pool = pool
        self.capture_error_mode = capture_error_mode
        if stream is None:
            index = devices.current_device()
            stream = self.default_capture_streams.setdefault(index, streams.Stream(index))
        self.capture_stream = stream
        self._stream_context = streams.stream(stream)

    def __enter__(self) -> None:
        devices.synchronize()
        if torch.compiler.config.force_cudagraph_gc:
            gc.collect()
        memory.empty_cache()
        self._stream_context.__enter__()
        try:
            self.foo_graph.capture_begin(self.pool, self.capture_error_mode)
        except BaseException as error:
            self._stream_context.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.foo_graph.capture_end()
        except RuntimeError:
            # Keep the exception that made the capture fail, which says more.
            if exception is None:
                raise
        finally:
            self._stream_context.__exit__(exception_type, exception, traceback)


def _captured(name: str, written: list[bool | None], kernel: Any) -> Any:
    return functools.partial(_C.capture_kernel, name, written, kernel)


def _refuse_step_on_host(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _C.is_current_stream_capturing():
        return
    if not all(group.get("capturable", True) for group in optimizer.param_groups):
        # torch raises this error on the devices that it knows.
        raise RuntimeError(
            "Attempting graph capture of step() for an instance of "
            f"{type(optimizer).__name__} but param_groups' capturable is False."
        )


class _Hooks:
    """Hooks that exist only during captures, so other programs do not see them."""

    def __init__(self) -> None:
        self._of_optimizers: RemovableHandle | None = None

    def change(self, is_capturing: bool) -> None:
        _compiled_kernels.put_around("capture", _captured if is_capturing else None)
        if self._of_optimizers is not None:
            self._of_optimizers.remove()
        self._of_optimizers = (
            register_optimizer_step_pre_hook(_refuse_step_on_host) if is_capturing else None
        )


_C.set_capture_listener(_Hooks().change)


# -------------------------------------------------------------------------------- graphed callables

# Replace functions and modules by graphs of their forward and backward passes.


_Callable = Callable[..., Any]
_Tensors = tuple[torch.Tensor, ...]


class _Graphed:
    """A callable, its graphs, and the tensors that they read and write."""

    def __init__(self, function: _Callable, arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.forward = FooGraph()
        self.backward = FooGraph()
        self.outputs: list[torch.Tensor] = []
        self.output_spec: Any = None
        self.output_gradients: list[torch.Tensor | None] = []
        self.input_gradients: list[torch.Tensor | None] = []
        self.sample_inputs: list[torch.Tensor] = pytree.arg_tree_leaves(*arguments)
        for sample in self.sample_inputs:
            if not isinstance(sample, torch.Tensor):
                raise TypeError(
                    "make_graphed_callables: sample_args must be tensors, got "
                    f"{type(sample).__name__}"
                )
        self.parameters: list[torch.Tensor] = []
        if isinstance(function, torch.nn.Module):
            _check_module(function)
            self.parameters = list(function.parameters())

    @property
    def inputs(self) -> list[torch.Tensor]:
        return self.sample_inputs + self.parameters

    @property
    def differentiable_inputs(self) -> list[torch.Tensor]:
        return [it for it in self.inputs if it.requires_grad]

    def gradients(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[Any], allow_unused: bool
    ) -> Sequence[torch.Tensor | None]:
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        if not pairs or not self.differentiable_inputs:
            return [None] * len(self.differentiable_inputs)
        return torch.autograd.grad(
            outputs=[output for output, _ in pairs],
            inputs=self.differentiable_inputs,
            grad_outputs=[gradient for _, gradient in pairs],
            allow_unused=allow_unused,
        )

    def warm_up(self, times: int, allow_unused: bool) -> None:
        for _ in range(times):
            outputs = pytree.tree_leaves(self.function(*self.arguments))
            self.gradients(outputs, [torch.ones_like(it) for it in outputs], allow_unused)

    def capture_forward(self, pool: PoolHandle) -> None:
        with graph(self.forward, pool=pool):
            results = self.function(*self.arguments)
        self.outputs, self.output_spec = pytree.tree_flatten(results)

    def capture_backward(self, pool: PoolHandle, allow_unused: bool) -> None:
        self.output_gradients = [
            torch.empty_like(it) if it.requires_grad else None for it in self.outputs
        ]
        with graph(self.backward, pool=pool):
            found = iter(self.gradients(self.outputs, self.output_gradients, allow_unused))
        self.input_gradients = [next(found) if it.requires_grad else None for it in self.inputs]

    def replacement(self) -> _Callable:
        graphed = self

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: torch.Tensor) -> _Tensors:
                # Only the sample inputs are copied; parameters are the graph's own.
                for place, given in zip(graphed.sample_inputs, inputs, strict=False):
                    if place.data_ptr() != given.data_ptr():
                        place.copy_(given)
                graphed.forward.replay()
                return tuple(it.detach() for it in graphed.outputs)

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
                for place, given in zip(graphed.output_gradients, gradients, strict=True):
                    if place is not None and place.data_ptr() != given.data_ptr():
                        place.copy_(given)
                graphed.backward.replay()
                return tuple(None if it is None else it.detach() for it in graphed.input_gradients)

        def call(*arguments: Any) -> Any:
            results = Replay.apply(*pytree.arg_tree_leaves(*arguments), *graphed.parameters)
            return pytree.tree_unflatten(results, graphed.output_spec)

        return call


def _check_module(module: torch.nn.Module) -> None:
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ValueError(
            "make_graphed_callables: modules must have no hooks when they are passed; register "
            "hooks afterwards"
        )
    if any(it.requires_grad for it in module.buffers()):
        raise ValueError("make_graphed_callables: buffers of modules must not require gradients")


def _put_into(module: torch.nn.Module, graphed: _Callable) -> torch.nn.Module:
    is_training, forward = module.training, module.forward

    def call(*arguments: Any, **keywords: Any) -> Any:
        # Only one mode, training or evaluation, was captured.
        chosen = graphed if module.training == is_training else forward
        return chosen(*arguments, **keywords)

    module.forward = call
    return module


def make_graphed_callables(
    callables: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: PoolHandle | None = None,
) -> Any:
    """Return functions or modules whose forward and backward passes replay graphs.

    Args:
        callables: A function or module, or a tuple of them in the order in which they will run.
            Modules are changed in place, and returned.
        sample_args: The tensors of a call, or a tuple of these for each callable. The graphs read
            these tensors; later arguments are copied into them.
        num_warmup_iters: How often each callable runs before the capture.
        allow_unused_input: Whether inputs may have no influence on outputs.
        pool: The pool of memory; None for a new one.

    Raises:
        RuntimeError: Under autocast with its cache.
        TypeError: For arguments that are not tensors.
        ValueError: For a module that has hooks, or a buffer that requires a gradient.

    Example:
        >>> model = torch.nn.Linear(3, 2, device="foo")
        >>> x = torch.ones(4, 3, device="foo")
        >>> expected = model(x)
        >>> graphed = torch.foo.make_graphed_callables(model, (torch.zeros_like(x),))
        >>> torch.equal(graphed(x), expected)
        True
    """
    if torch.is_autocast_enabled("foo") and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            "make_graphed_callables: autocast must not cache converted tensors; pass "
            "cache_enabled=False to torch.autocast"
        )
    is_single = not isinstance(callables, tuple)
    functions = (callables,) if is_single else callables
    arguments = (sample_args,) if is_single else sample_args
    graphed = [_Graphed(*pair) for pair in zip(functions, arguments, strict=True)]
    pool = graph_pool_handle() if pool is None else pool
    devices.synchronize()
    with streams.stream(streams.Stream()):
        for each in graphed:
            each.warm_up(num_warmup_iters, allow_unused_input)
    devices.synchronize()
    for each in graphed:
        each.capture_forward(pool)
    for each in reversed(graphed):
        each.capture_backward(pool, allow_unused_input)
    replacements = tuple(
        _put_into(it.function, it.replacement())
        if isinstance(it.function, torch.nn.Module)
        else it.replacement()
        for it in graphed
    )
    return replacements[0] if is_single else replacements
