"""Replace functions and modules by graphs of their forward and backward passes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from foo_ops.device import devices, graphs, streams

_Callable = Callable[..., Any]
_Tensors = tuple[torch.Tensor, ...]


class _Graphed:
    """A callable, and the tensors that its graphs read and write."""

    def __init__(self, function: _Callable, arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.forward = graphs.FooGraph()
        self.backward = graphs.FooGraph()
        self.outputs: list[torch.Tensor] = []
        self.output_spec: Any = None
        self.output_gradients: list[torch.Tensor | None] = []
        self.input_gradients: list[torch.Tensor | None] = []
        self.sample_inputs: list[torch.Tensor] = pytree.arg_tree_leaves(*arguments)
        if not all(isinstance(it, torch.Tensor) for it in self.sample_inputs):
            raise TypeError("make_graphed_callables: sample_args must be tensors, and no others")
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

    def capture_forward(self, pool: graphs.PoolHandle) -> None:
        with graphs.graph(self.forward, pool=pool):
            results = self.function(*self.arguments)
        self.outputs, self.output_spec = pytree.tree_flatten(results)

    def capture_backward(self, pool: graphs.PoolHandle, allow_unused: bool) -> None:
        self.output_gradients = [
            torch.empty_like(it) if it.requires_grad else None for it in self.outputs
        ]
        with graphs.graph(self.backward, pool=pool):
            found = iter(self.gradients(self.outputs, self.output_gradients, allow_unused))
        self.input_gradients = [next(found) if it.requires_grad else None for it in self.inputs]

    def replacement(self) -> _Callable:
        graphed = self

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: torch.Tensor) -> _Tensors:
                # The parameters are those of the graph.
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
            "make_graphed_callables: modules must have no hooks yet: register them afterwards"
        )
    if any(it.requires_grad for it in module.buffers()):
        raise ValueError("make_graphed_callables: buffers of modules must not require gradients")


def _put_into(module: torch.nn.Module, graphed: _Callable) -> torch.nn.Module:
    is_training, forward = module.training, module.forward

    def call(*arguments: Any, **keywords: Any) -> Any:
        # The other mode was not captured.
        chosen = graphed if module.training == is_training else forward
        return chosen(*arguments, **keywords)

    module.forward = call
    return module


def make_graphed_callables(
    callables: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: graphs.PoolHandle | None = None,
) -> Any:
    """Return functions or modules whose forward and backward passes replay graphs.

    Args:
        callables: A function or module, or a tuple of them in the order in which they will run.
            Modules are changed, and returned.
        sample_args: The tensors of a call, or a tuple of these for each callable. The graphs read
            them, and later arguments are copied there.
        num_warmup_iters: How often each is run before it is captured.
        allow_unused_input: Whether inputs may have no influence on outputs.
        pool: The pool of memory; None for a new one.

    Raises:
        RuntimeError: Under autocast with its cache.
        TypeError: For arguments that are no tensors.
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
            "make_graphed_callables: autocast must not keep converted tensors: cache_enabled=False"
        )
    is_single = not isinstance(callables, tuple)
    functions = (callables,) if is_single else callables
    arguments = (sample_args,) if is_single else sample_args
    graphed = [_Graphed(*pair) for pair in zip(functions, arguments, strict=True)]
    pool = graphs.graph_pool_handle() if pool is None else pool
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
