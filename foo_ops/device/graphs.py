"""Capture what a stream is given as a graph, and replay it."""

import contextlib
import functools
import gc
from types import TracebackType
from typing import Any, ClassVar, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from foo_ops._C import device as _C
from foo_ops.device import _compiled_kernels, devices, memory, streams

PoolHandle = tuple[int, int]
CaptureErrorMode = Literal["default", "global", "thread_local", "relaxed"]


def is_current_stream_capturing() -> bool:
    """Return whether a graph captures what the current stream is given.

    Example:
        >>> torch.foo.is_current_stream_capturing()
        False
    """
    return _C.is_current_stream_capturing()


def graph_pool_handle() -> PoolHandle:
    """Return the name of a new pool of memory, for graphs that are to share it.

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


class FooGraph(torch._C._acceleratorGraph):
    """A list of operators that a stream was given, to be replayed with the same memory.

    It is what ``torch.cuda.CUDAGraph`` is there; ``torch.accelerator.Graph`` is the same behind
    another face. Operators run once while they are captured, as their results' shapes are known no
    sooner, and what they wrote to tensors from before is then put back: the values of results mean
    nothing until the first replay.

    Args:
        keep_graph: Whether :meth:`instantiate`, or the first replay, makes it ready, and not the
            end of the capture.

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
        """Begin to capture what the current stream is given, which must not be the default one.

        Args:
            pool: The pool of another graph, or of :func:`graph_pool_handle`; None for a new one.
            capture_error_mode: As for a ``CUDAGraph``. On foo all modes refuse the same.
        """
        super().capture_begin(pool=pool, capture_error_mode=capture_error_mode)

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Do nothing, as every replay goes on where each generator of foo is.

        Args:
            generator: One that operators of the graph draw from.
        """


class graph(contextlib.AbstractContextManager[None]):  # noqa: N801
    """Captures what is done inside of ``with``.

    Args:
        foo_graph: The graph that captures.
        pool: The pool of another graph, or of :func:`graph_pool_handle`; None for a new one.
        stream: The stream to capture, which is the current one inside; None for one of its own.
        capture_error_mode: As for a ``CUDAGraph``. On foo all modes refuse the same.

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
            # The exception that made the capture fail says more.
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
        # torch says so where it knows the device.
        raise RuntimeError(
            "Attempting graph capture of step() for an instance of "
            f"{type(optimizer).__name__} but param_groups' capturable is False."
        )


class _Hooks:
    """What is there only while something is captured: other programs see nothing of it."""

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
