"""Make kernels over views of whole tensors, tile by tile."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch

from foo_ops import _C
from foo_ops.kernels.compiler.kernel import size_name
from foo_ops.kernels.table import TILE
from foo_ops.library.choices import with_choices
from foo_ops.library.functions import by_position, require_function
from foo_ops.library.kernels import (
    Launcher,
    NumbaKernel,
    add_source,
    count_parameters,
    cpp_parameter,
    kinds_of,
)
from foo_ops.library.operators import Parameter, describe, parameters_of
from foo_ops.library.scratch import Scratch
from foo_ops.library.tile_fakes import make_fake
from foo_ops.library.tile_refusals import (
    check_late_refusal,
    check_lists,
    refuse_scalars_alone,
    require_no_result,
    require_scratch,
    require_verdict,
)
from foo_ops.library.tile_rows import make_row_reader
from foo_ops.library.tile_sharding import make_tile_sharding
from foo_ops.library.tile_values import remember_values
from foo_ops.library.tile_vmap import make_tile_rule


@dataclasses.dataclass(frozen=True)
class TileKernel(NumbaKernel):
    """A kernel that `tile_kernel` makes."""

    function: Callable[..., Any]
    tiles: Callable[..., int] | None
    contiguous_rows: bool
    finish: Callable[..., None] | None
    check: Callable[..., bool] | None
    refuse: Callable[..., None] | None
    scratch: Mapping[str, Scratch]

    @property
    def refuses_late(self) -> bool:
        """Whether the function itself tells what it cannot use."""
        return self.refuse is not None and self.check is None

    def launcher(
        self, operator: torch._ops.OpOverload, parameters: Sequence[Parameter]
    ) -> Launcher:
        results = _results(self.function, self.scratch, operator, parameters)
        parameters = with_choices(operator, parameters, self.function)
        check_lists(operator, parameters)
        refuse_scalars_alone(operator, parameters)
        optional = {"tiles": self.tiles, "check": self.check, "finish": self.finish}
        others = {name: function for name, function in optional.items() if function is not None}
        sizes = [size for scratch in self.scratch.values() for size in scratch.functions()]
        others |= {size_name(position): size for position, size in enumerate(sizes)}
        *names, _ = inspect.signature(self.function).parameters
        seeds = [name for name, p in zip(names, parameters) if p.kind == "generator"]
        taken = {
            name: self._taken(name, operator, function, seeds) for name, function in others.items()
        }
        if self.tiles is None and not any(p.is_tensor and not p.is_optional for p in parameters):
            raise TypeError(
                f"{operator.name()}: without a tensor that is always there, tile_kernel must be "
                "given the number of tiles, tiles=..."
            )
        kinds = kinds_of(parameters) + ("tensor",) * results
        described = [
            (_position_of_like(operator, name, scratch.like, names, kinds), scratch.dimensions)
            for name, scratch in self.scratch.items()
        ]
        kinds += ("scratch",) * len(described)
        if self.refuses_late:
            check_late_refusal(operator, parameters)
        options = (
            *(kinds, tuple(names), self.contiguous_rows, taken, tuple(described)),
            self.refuses_late,
        )
        functions = (self.function, *others.values())
        kernel = add_source(operator, functions, TILE, *options)
        cpp_parameters = list(map(cpp_parameter, parameters))
        is_repeated = results > 0 and not _fresh(operator)
        checked = taken.get("check", ())
        checks = [position in checked for position in range(len(parameters))]
        refuse = self._refusal(operator, seeds, len(parameters))

        def register_for(key: str) -> tuple[Any, ...]:
            registration = _C.register_tile(
                operator.name(),
                key,
                kernel,
                cpp_parameters,
                names,
                self.contiguous_rows,
                is_repeated,
                self.finish is not None,
                self.refuses_late,
                [(*it, scratch.per_call) for it, scratch in zip(described, self.scratch.values())],
                checks,
                refuse,
            )
            return registration, remember_values(operator, key, parameters, cpp_parameters)

        draws = any(parameter.kind == "generator" for parameter in parameters)
        by_rows = not (self.tiles or self.finish or self.refuse or draws)
        rows = make_row_reader(operator, self.function if by_rows else None, names)
        rule = make_tile_rule(operator, parameters, rows)
        sharding = make_tile_sharding(operator, rows)
        return Launcher(register_for, make_fake(operator, parameters), rule, sharding)

    def _refusal(
        self, operator: torch._ops.OpOverload, seeds: Sequence[str], count: int
    ) -> Callable[..., None] | None:
        """Return what is called with all arguments of the operator; results it does not get."""
        if self.refuse is None:
            return None
        refuse = by_position(self.refuse)
        taken = self._taken("refuse", operator, refuse, seeds, count)
        return lambda *arguments: refuse(*(arguments[position] for position in taken))

    def _lists(self, operator: torch._ops.OpOverload) -> set[str]:
        names = inspect.signature(self.function).parameters
        return {name for name, p in zip(names, parameters_of(operator)) if p.kind == "tensors"}

    def _taken(
        self,
        name: str,
        operator: torch._ops.OpOverload,
        function: Callable[..., Any],
        seeds: Sequence[str],
        count: int | None = None,
    ) -> tuple[int, ...]:
        """Return which of the kernel's arguments, or of the first ones, another function names."""
        *names, _ = inspect.signature(self.function).parameters
        # Before the tiles there is neither scratch memory nor a seed; after them some still.
        late = {*seeds, *self.scratch}
        if name == "check":
            # Their contents could be others when the kernel reads them.
            late |= self._lists(operator)
        if name == "finish":
            late = {name for name, scratch in self.scratch.items() if not scratch.per_call}
        arguments = [argument for argument in names[:count] if argument not in late]
        for parameter in inspect.signature(function).parameters:
            if parameter not in arguments:
                raise TypeError(
                    f"{operator.name()}: {name} must take arguments that the kernel has "
                    f"({', '.join(arguments)}), and {describe(function)} takes {parameter}"
                )
        return tuple(map(names.index, inspect.signature(function).parameters))


@overload
def tile_kernel(
    function: Callable[..., Any],
    /,
    *,
    tiles: Callable[..., int] | None = None,
    contiguous_rows: bool = False,
    finish: Callable[..., None] | None = None,
    check: Callable[..., bool] | None = None,
    refuse: Callable[..., None] | None = None,
    scratch: Mapping[str, Scratch] | None = None,
) -> TileKernel: ...


@overload
def tile_kernel(
    function: None = None,
    /,
    *,
    tiles: Callable[..., int] | None = None,
    contiguous_rows: bool = False,
    finish: Callable[..., None] | None = None,
    check: Callable[..., bool] | None = None,
    refuse: Callable[..., None] | None = None,
    scratch: Mapping[str, Scratch] | None = None,
) -> Callable[[Callable[..., Any]], TileKernel]: ...


def tile_kernel(
    function: Callable[..., Any] | None = None,
    /,
    *,
    tiles: Callable[..., int] | None = None,
    contiguous_rows: bool = False,
    finish: Callable[..., None] | None = None,
    check: Callable[..., bool] | None = None,
    refuse: Callable[..., None] | None = None,
    scratch: Mapping[str, Scratch] | None = None,
) -> Any:
    """Make a kernel of a function over arrays, for `register_kernel`.

    The function is called with the operator's arguments in the order of its schema, then its
    results, then a range of tiles: ``function(input, weight, eps, output, rows)``. Numba compiles
    it at its first use for these dtypes, and threads run it on ranges of tiles. It returns nothing,
    but see ``refuse``.

    - A tensor is a view with ``shape``, ``strides``, ``ndim``, ``size``, ``rows``, ``data``,
      ``row(i)``, elements ``x[i, j]`` and ``x.flat[i]`` (see foo_ops/kernels/lang/views.py).
      bfloat16 and float16 are read as float32 and rounded when they are written. An index that is a
      negative constant counts from the end. No other one is compared with the shape, but under
      `check_bounds`.
    - A generator comes as an int64, a seed that is drawn from it for each call that is not refused,
      or from the default one of the tensors' device: ``language.random(seed, index)``.
    - float, int and bool come as float64, int64 and bool, what is missing as None; docs/kit.md has
      all types. A float64 makes what it meets float64, but `foo_ops.language.cast` narrows it.
    - Results are allocated as the operator's fake kernel says, which is called once for the same
      shapes and numbers. They are not initialised. What it refuses is refused, and nothing is
      written: by an operator that works in place, too, and where ``f_`` has no fake kernel, that of
      ``f`` is asked.
    - Of an operator that works in place the function gets the argument, which it changes. Where it
      has a parameter more, it gets that argument once more in place of the result, so that one
      function can serve ``f`` and ``f_``.
    - Of an operator ``f.out`` it gets ``out`` in place of the result.

    What a tile is must not depend on which other tiles a call gets; then results are the same for
    every number of threads. `foo_ops.language` has exponentials, sums that are vectorised, and
    vectors. The function must not allocate, raise, or call Python.

    Args:
        function: the function; without it this is a decorator.
        tiles: gives the number of tiles. By default it is the number of rows of the first tensor:
            of all its dimensions but the last, multiplied.
        contiguous_rows: give the function copies of those tensors whose last dimension has another
            stride than 1, so that a row is adjacent elements: loops over it are vectorised best.
            Without it a row has the stride that its tensor has.
        finish: is called once when all tiles are done, on one thread, also where there are none:
            for what is made of all tiles, such as a mean.
        check: tells before anything is written whether what the tensors contain can be used, such
            as indices. Tensors of integers or bools that it takes are copied first, so that the
            function gets the numbers that were checked, whatever other threads do.
        refuse: a Python function, which is called where it cannot, and raises what is wrong: a
            ValueError, an IndexError, a TypeError or a RuntimeError. Without ``check``, the kernel
            itself returns True, or False where a tile cannot use what it reads. That costs no pass
            over the indices and no copy of them: on 2 threads, sums of bags with 20 rows of 128
            bfloat16 take four fifths of the time. Such a kernel must use the number that it
            compared, and not read it again; its operator must write to no argument but ``out``,
            and draw no random numbers.
        scratch: memory to work in, which the function gets as views after its results, by their
            names: ``scratch={"sums": library.scratch(...)}``; see `scratch`.

    ``tiles``, ``finish`` and ``check`` are compiled as well. Each gets those of the function's
    arguments that it names, as in ``tiles=lambda output: output.size``. ``refuse`` does, too, but
    for the results.

    Example:
        >>> foo_ops.library.define("mylib::row_sum", "(Tensor input) -> Tensor")
        >>> @foo_ops.library.register_fake("mylib::row_sum")
        ... def row_sum_fake(input):
        ...     return input.new_empty(input.shape[:-1])
        >>> @foo_ops.library.register_kernel("mylib::row_sum", ("cpu", "foo"))
        ... @foo_ops.library.tile_kernel(contiguous_rows=True)
        ... def row_sum(input, output, rows):
        ...     for row in rows:
        ...         x, total = input.row(row), language.zero(input)
        ...         for i in range(input.shape[-1]):
        ...             total = language.accumulate(total, x[i])
        ...         output.flat[row] = total
    """

    def make(function: Callable[..., Any]) -> TileKernel:
        if check is not None and refuse is None:
            raise TypeError("tile_kernel: check must come with refuse, which raises what is wrong")
        require_function("tile_kernel must be given", function)
        for name, other in {"tiles": tiles, "finish": finish, "check": check}.items():
            if other is not None:
                require_function(f"tile_kernel: {name} must be", other)
        if refuse is not None and not callable(refuse):
            raise TypeError(f"tile_kernel: refuse must be a function, got {refuse!r}")
        require_scratch(function, scratch)
        made = TileKernel(function, tiles, contiguous_rows, finish, check, refuse, scratch or {})
        if made.refuses_late:
            require_verdict(function)
        else:
            require_no_result(function)
        if finish is not None:
            require_no_result(finish)
        return made

    return make if function is None else make(function)


def _position_of_like(
    operator: torch._ops.OpOverload,
    name: str,
    like: str,
    names: Sequence[str],
    kinds: Sequence[str],
) -> int:
    """Return the argument in whose compute type scratch memory is."""
    tensors = [argument for argument, kind in zip(names, kinds) if kind == "tensor"]
    if like not in tensors:
        raise TypeError(
            f"{operator.name()}: scratch {name} must be like a tensor that is always there "
            f"({', '.join(tensors)}), got {like}"
        )
    return names.index(like)


def _fresh(operator: torch._ops.OpOverload) -> int:
    """Count the results that are no arguments that are written."""
    return sum(result.alias_info is None for result in operator._schema.returns)


def _results(
    function: Callable[..., Any],
    scratch: Mapping[str, Scratch],
    operator: torch._ops.OpOverload,
    parameters: Sequence[Parameter],
) -> int:
    """Count the tensors that the function takes after the operator's arguments."""
    fresh = _fresh(operator)
    repeated = sum(p.role == "in place" for p in parameters if p.is_tensor)
    taken = count_parameters(function) - 1 - len(scratch)
    if taken == len(parameters) + fresh:
        return fresh
    if not fresh and taken == len(parameters) + repeated:
        return repeated
    arguments = [*(p.name for p in parameters), *["result"] * fresh, *scratch, "tiles"]
    raise TypeError(
        f"{operator.name()}: its kernel must take {len(arguments)} arguments "
        f"({', '.join(arguments)}), and {describe(function)} takes {count_parameters(function)}"
    )
