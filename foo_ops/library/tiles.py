"""Make kernels over views of whole tensors, tile by tile, and their fake kernels."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from torch import Tensor

from foo_ops import _C
from foo_ops.compat import (
    OpOverload,
    has_kernel,
    has_kernel_for_key,
    pytree,
)
from foo_ops.kernels.compiler.inspection import row_dimensions
from foo_ops.kernels.compiler.kernel import Maker, size_name
from foo_ops.library.kernels import (
    Launcher,
    NumbaKernel,
    Scratch,
    add_source,
    by_position,
    check_late_refusal,
    check_lists,
    count_parameters,
    cpp_parameter,
    kinds_of,
    refuse_scalars_alone,
    require_function,
    require_no_result,
    require_scratch,
    require_verdict,
)
from foo_ops.library.operators import (
    Parameter,
    describe,
    find,
    have_sizes,
    parameters_of,
    remember_values,
    short_name,
    tensors_in,
    with_choices,
)
from foo_ops.library.rules import (
    REST,
    WHOLE,
    ShardingRule,
    VmapRule,
    in_first_place,
    in_front,
    make_loop,
    make_loop_in_place,
    make_random_loop,
    make_uniform_rule,
    meta_element,
)

# ------------------------------------------------------------------------------------- fake kernels

# Make the fake kernels of ``f.out`` and ``f_`` from that of ``f``.


Fake = Callable[..., Any]


def make_fake(operator: OpOverload, parameters: Sequence[Parameter]) -> Fake | None:
    """Make the fake kernel of ``f.out`` or ``f_``; None if the operator's author provides it."""
    if any(p.role == "out" for p in parameters):
        return _fake_of_out(operator, parameters)
    if short_name(operator).endswith("_") and not _has_fake(operator):
        return _fake_in_place(operator, parameters)
    return None


def _has_fake(operator: OpOverload) -> bool:
    return has_kernel_for_key(operator.name(), "Meta")


def _fake_of_out(operator: OpOverload, parameters: Sequence[Parameter]) -> Fake:
    outs = [p.name for p in parameters if p.role == "out"]
    functional = _functional(operator, parameters)
    name, taken = short_name(operator), [cpp_parameter(parameter) for parameter in parameters]

    def fake(*args: Any, **kwargs: Any) -> Any:
        given = {p.name: argument for p, argument in zip(parameters, args)} | kwargs
        tensors = [given.get(p.name) if p.is_tensor else None for p in parameters]
        _C.check_devices(name, taken, tensors)
        targets: list[Tensor] = [kwargs.pop(out) for out in outs]
        results = functional(*args, **kwargs)
        results = (results,) if len(targets) == 1 else results
        for out, target, result in zip(outs, targets, results):
            others = [x for p, x in zip(parameters, tensors) if x is not None and p.name != out]
            _C.check_out(name, out, target, result, others)
        for out, target, result in zip(outs, targets, results):
            if not have_sizes(target.shape, result.shape):
                # It will be resized, and then shares memory with no other tensor.
                given[out] = None
        _C.check_written_memory(name, taken, [given.get(p.name) for p in parameters])
        for target, result in zip(targets, results):
            if not have_sizes(target.shape, result.shape):
                target.resize_(result.shape)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return fake


def _functional(operator: OpOverload, parameters: Sequence[Parameter]) -> OpOverload:
    """Return the operator ``f`` of ``f.out``, whose fake kernel gives the results."""
    functional = find(operator.name().partition(".")[0])
    inputs = [p for p in parameters if p.role != "out"]
    if (
        list(parameters_of(functional)) != inputs
        or [p.role for p in parameters[len(inputs) :]] != ["out"] * len(functional._schema.returns)
    ):  # fmt: skip
        raise TypeError(
            f"{operator.name()}: it must take the arguments of {functional.name()}, and then an "
            f"out for each result: {functional._schema}, got {operator._schema}"
        )
    return functional


def _fake_in_place(operator: OpOverload, parameters: Sequence[Parameter]) -> Fake:
    name, names = short_name(operator), [p.name for p in parameters]
    taken = [cpp_parameter(parameter) for parameter in parameters]
    written = [p.name for p in parameters if p.role == "in place"]
    count = len(operator._schema.returns)

    def fake(*args: Any, **kwargs: Any) -> Any:
        twin = _twin(operator, parameters)
        if twin is None or not _has_fake(twin):
            raise RuntimeError(
                f"{operator.name()}: a tile kernel needs a fake kernel, which says how its results "
                "are allocated: register one with foo_ops.library.register_fake"
            )
        given = dict(zip(names, args)) | kwargs
        renamed = dict(zip(names, (it.name for it in twin._schema.arguments)))
        results = twin(**{renamed[argument]: value for argument, value in given.items()})
        results = results if isinstance(results, (tuple, list)) else (results,)
        for argument, result in zip(written, results):
            target = given.get(argument)
            if target is None:
                continue
            if not have_sizes(target.shape, result.shape):
                raise ValueError(
                    f"{name}: {argument} must have shape {list(result.shape)} as the result has, "
                    f"got {list(target.shape)}"
                )
            _C.check_out(name, argument, target, result, [])
        _C.check_written_memory(name, taken, [given.get(argument) for argument in names])
        targets = [given[argument] for argument in written[:count]]
        return targets[0] if count == 1 else tuple(targets) or None

    return fake


def _twin(operator: OpOverload, parameters: Sequence[Parameter]) -> OpOverload | None:
    """Return the operator ``f`` for ``f_``, if its results are the tensors that ``f_`` writes."""
    name = operator.name().partition(".")[0].removesuffix("_")
    if not has_kernel(name):
        return None
    twin = find(name)
    arguments, schema = operator._schema.arguments, twin._schema
    is_twin = (
        not schema.is_mutable
        and [str(it.real_type) for it in schema.arguments]
        == [str(it.real_type) for it in arguments]
        and len(schema.returns) == sum(p.role == "in place" for p in parameters)
    )
    return twin if is_twin else None


# ------------------------------------------------------------------------------------------ kernels

# Make kernels over views of whole tensors, tile by tile.


_MAKER = Maker("foo_ops.kernels.user.tile", "make_tile_kernel")


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
        """Whether the function itself finds out what it cannot use."""
        return self.refuse is not None and self.check is None

    def launcher(self, operator: OpOverload, parameters: Sequence[Parameter]) -> Launcher:
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
                f"{operator.name()}: tile_kernel must be given tiles=..., the number of tiles, if "
                "no tensor is always there"
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
        kernel = add_source(operator, functions, _MAKER, *options)
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
        self, operator: OpOverload, seeds: Sequence[str], count: int
    ) -> Callable[..., None] | None:
        """Return ``refuse`` as a function of all arguments of the operator, without its results."""
        if self.refuse is None:
            return None
        refuse = by_position(self.refuse)
        taken = self._taken("refuse", operator, refuse, seeds, count)
        return lambda *arguments: refuse(*(arguments[position] for position in taken))

    def _lists(self, operator: OpOverload) -> set[str]:
        names = inspect.signature(self.function).parameters
        return {name for name, p in zip(names, parameters_of(operator)) if p.kind == "tensors"}

    def _taken(
        self,
        name: str,
        operator: OpOverload,
        function: Callable[..., Any],
        seeds: Sequence[str],
        count: int | None = None,
    ) -> tuple[int, ...]:
        """Return the positions, below ``count``, of the kernel arguments that a function names."""
        *names, _ = inspect.signature(self.function).parameters
        # Before the tiles there are no seeds and no scratch memory; afterwards there are seeds and
        # the scratch memory of a call.
        late = {*seeds, *self.scratch}
        if name == "check":
            # The contents of lists could change before the kernel reads them.
            late |= self._lists(operator)
        if name == "finish":
            late = {name for name, scratch in self.scratch.items() if not scratch.per_call}
        arguments = [argument for argument in names[:count] if argument not in late]
        for parameter in inspect.signature(function).parameters:
            if parameter not in arguments:
                raise TypeError(
                    f"{operator.name()}: {name} must take arguments that the kernel has "
                    f"({', '.join(arguments)}), got {parameter} in {describe(function)}"
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
    """Make a kernel from a function over arrays, for `register_kernel`.

    The function is called with the operator's arguments in the order of its schema, then its
    results, then a range of tiles: ``function(input, weight, eps, output, rows)``. Numba compiles
    it at its first use for these dtypes, and threads run it on ranges of tiles. It returns nothing,
    but see ``refuse``.

    - A tensor is a view with ``shape``, ``strides``, ``ndim``, ``size``, ``rows``, ``data``,
      ``row(i)``, elements ``x[i, j]`` and ``x.flat[i]`` (see foo_ops/kernels/lang/views.py).
      bfloat16 and float16 are read as float32 and rounded when they are written. An index that is a
      negative constant counts from the end. Other indices are not compared with the shape, except
      under `check_bounds`.
    - A generator comes as a seed, an int64, for ``language.random(seed, index)``. The seed is drawn
      from the generator, or from the default one of the tensors' device, for each call that is not
      refused.
    - float, int and bool come as float64, int64 and bool, missing arguments as None;
      docs/kit_reference.md has all types. Arithmetic with a float64 gives float64;
      `foo_ops.language.cast` narrows it.
    - Results are allocated as the operator's fake kernel says, which is called once for the same
      shapes and numbers. They are not initialised. If the fake kernel raises, the call raises and
      nothing is written. This also holds for in-place operators; if ``f_`` has no fake kernel, that
      of ``f`` is called.
    - For an in-place operator the function changes the argument. If it has one parameter more, it
      gets that argument again as the result, so that one function can serve ``f`` and ``f_``.
    - For an operator ``f.out`` it gets ``out`` as the result.

    A tile must not depend on the other tiles of its range; then results are equal for any number of
    threads. `foo_ops.language` has exponentials, vectorised sums, and vectors. The function must
    not allocate, raise, or call Python.

    Args:
        function: the function; if omitted, returns a decorator.
        tiles: returns the number of tiles. The default is the number of rows of the first tensor:
            the product of all its dimensions but the last.
        contiguous_rows: pass copies of tensors whose last dimension has a stride other than 1, so
            that rows are contiguous: loops over them are vectorised best. By default a row has its
            tensor's stride.
        finish: called once on one thread when all tiles are done, even if there are none: for
            results of all tiles, such as a mean.
        check: returns, before anything is written, whether the kernel can use the tensors' values,
            such as indices. Integer and bool tensors that it takes are copied first, so that the
            function gets the values that were checked, whatever other threads do.
        refuse: a Python function, called if the kernel cannot use them, which raises a ValueError,
            an IndexError, a TypeError or a RuntimeError. Without ``check``, the kernel itself
            returns True, or False if a tile cannot use what it reads. That costs no pass over the
            indices and no copy of them: on 2 threads, sums of bags with 20 rows of 128 bfloat16
            take four fifths of the time. Such a kernel must use the number that it compared, and
            not read it again; its operator must write to no argument but ``out``, and draw no
            random numbers.
        scratch: scratch memory, which the function takes as views after its results, by name:
            ``scratch={"sums": library.scratch(...)}``; see `scratch`.

    ``tiles``, ``finish`` and ``check`` are compiled as well. Each takes the function's arguments
    that it names, as in ``tiles=lambda output: output.size``. So does ``refuse``, which gets no
    results.

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
            raise TypeError(
                "tile_kernel: check must be given together with refuse, which raises the error"
            )
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
    operator: OpOverload,
    name: str,
    like: str,
    names: Sequence[str],
    kinds: Sequence[str],
) -> int:
    """Return the position of the argument whose compute type scratch memory has."""
    tensors = [argument for argument, kind in zip(names, kinds) if kind == "tensor"]
    if like not in tensors:
        raise TypeError(
            f"{operator.name()}: scratch {name} must be like a tensor that is not optional "
            f"({', '.join(tensors)}), got {like}"
        )
    return names.index(like)


def _fresh(operator: OpOverload) -> int:
    """Count the results that are not written arguments."""
    return sum(result.alias_info is None for result in operator._schema.returns)


def _results(
    function: Callable[..., Any],
    scratch: Mapping[str, Scratch],
    operator: OpOverload,
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
        f"({', '.join(arguments)}), got {describe(function)}, which takes "
        f"{count_parameters(function)}"
    )


# --------------------------------------------------------------------------------------------- rows

# How an operator uses the rows of its tensors, according to its tile kernel.


@dataclasses.dataclass(frozen=True)
class Rows:
    """Number of dimensions of each tensor within a row; None for a tensor that is read whole.

    Attributes:
        arguments: for each tensor argument, by its name in the schema.
        results: for each result, in order.
    """

    arguments: dict[str, int | None]
    results: Sequence[int | None]


RowReader = Callable[[], Rows | None]
"""Reads a kernel's source; returns None if the operator does not compute each row on its own."""


def make_row_reader(
    operator: OpOverload, function: Callable[..., Any] | None, names: Sequence[str]
) -> RowReader:
    """Make a reader of a kernel's source, which runs on first use: it is too slow for an import.

    Args:
        function: the kernel; None if its tiles are not rows.
        names: the kernel's parameters: the operator's arguments, then the results.
    """
    arguments, returns = operator._schema.arguments, operator._schema.returns
    own = {it.name: name for it, name in zip(arguments, names) if "Tensor" in str(it.type)}
    results = list(names[len(arguments) :])
    # The function has no parameters for results: each result is an argument that it writes.
    results = results or [_alias(it, arguments, names) for it in returns]
    written = [*(own[it.name] for it in arguments if it.is_write), *results]

    @functools.cache
    def read() -> Rows | None:
        found = function and row_dimensions(function, [*own.values(), *results], written)
        # The number of rows is that of the first tensor.
        if not found or found[next(iter(own.values()))] != 1:
            return None
        of_arguments = {argument: found[name] for argument, name in own.items()}
        return Rows(of_arguments, [found[name] for name in results])

    return read


def _alias(result: Any, arguments: Sequence[Any], names: Sequence[str]) -> str:
    aliases = result.alias_info.before_set
    return next(
        name
        for argument, name in zip(arguments, names)
        if argument.alias_info is not None and argument.alias_info.before_set == aliases
    )


# --------------------------------------------------------------------------------------- torch.vmap

# Map tile kernels under torch.vmap: by their rows in one call, or else by a loop.


def make_tile_rule(
    operator: OpOverload, parameters: Sequence[Parameter], read: RowReader
) -> VmapRule | None:
    """Make the rule of a tile kernel; ``f.out`` has none, like PyTorch's out variants."""
    name, is_mutable = operator.name(), operator._schema.is_mutable
    if any(parameter.kind == "generator" for parameter in parameters):
        return None if is_mutable else make_random_loop(name, tuple(parameters))
    if any(parameter.role == "out" for parameter in parameters):
        return None
    return make_loop_in_place(name) if is_mutable else _make_rule_of_rows(name, read)


def _make_rule_of_rows(name: str, read: RowReader) -> VmapRule:
    loop = make_loop(name)

    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any, **keywords: Any) -> Any:
        operator, size = find(name), info.batch_size
        rows = read() if size > 0 and not tensors_in(keywords) else None
        more = None if rows is None else _more_rows(operator, rows, size, in_dims, inputs)
        if more is None:
            return loop(info, in_dims, *inputs, **keywords)
        arguments, first = more
        one = operator(*map(meta_element, inputs, in_dims), **keywords)
        shapes = [_shape_of_more(result, size, first) for result in tensors_in(one)]
        if shapes != _shapes_of(operator, arguments, keywords):
            return loop(info, in_dims, *inputs, **keywords)
        results = operator(*arguments, **keywords)
        if first is not None:
            results = pytree.tree_map_only(
                Tensor, lambda result: result.unflatten(0, (size, first)), results
            )
        return results, in_first_place(results)

    return vmap


def _more_rows(
    operator: OpOverload,
    rows: Rows,
    size: int,
    in_dims: Sequence[Any],
    inputs: Sequence[Any],
) -> tuple[list[Any], int | None] | None:
    """Merge the mapped dimension into the first dimension of rows; return the inputs and its size.

    Tensors thus keep their number of dimensions, on which kernels and fake kernels may depend; a
    tensor of a single row gets one more. Returns None if another tensor is mapped, or if rows would
    be broadcast.
    """
    names = [argument.name for argument in operator._schema.arguments]
    more, before = list(inputs), set()
    for place, (name, tensor, in_dim) in enumerate(zip(names, inputs, in_dims)):
        inner = rows.arguments.get(name)
        if inner is not None and isinstance(tensor, Tensor):
            moved = in_front(tensor, in_dim, size)
            before.add(moved.shape[1 : moved.dim() - inner])
            more[place] = moved.flatten(0, 1) if moved.dim() - inner > 1 else moved
        elif in_dim is not None:
            return None
    if len(before) != 1:
        return None
    (shape,) = before
    return more, shape[0] if len(shape) > 0 else None


def _shape_of_more(result: Tensor, size: int, first: int | None) -> list[int] | None:
    """Return a result's shape with the merged rows; None if it has no dimension of rows."""
    if first is None:
        return [size, *result.shape]
    if result.dim() == 0 or result.shape[0] != first:
        return None
    return [size * first, *result.shape[1:]]


def _shapes_of(
    operator: OpOverload, arguments: Sequence[Any], keywords: dict[str, Any]
) -> list[list[int]] | None:
    """Return the shapes of the results; None if the fake kernel refuses this many rows."""
    arguments = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), arguments)
    try:
        return [list(result.shape) for result in tensors_in(operator(*arguments, **keywords))]
    except (ValueError, TypeError, RuntimeError):
        return None


# ------------------------------------------------------------------------------------------ DTensor

# Shard the rows of tile kernels that compute each row on its own.


def make_tile_sharding(operator: OpOverload, read: RowReader) -> ShardingRule:
    """Make the rule of a tile kernel: by its rows, or else on whole tensors."""
    whole = make_uniform_rule(operator, WHOLE)
    names = [argument.name for argument in operator._schema.arguments]

    def rule(*inputs: Any, **keywords: Any) -> str:
        rows = read()
        if rows is None:
            return whole()
        shapes = []
        for argument, tensor in (dict(zip(names, inputs)) | keywords).items():
            count = rows.arguments.get(argument)
            if count is not None and tensor is not None:
                shapes.append(tensor.shape[: len(tensor.shape) - count])
        if any(shape != shapes[0] for shape in shapes):
            return whole()
        before = ", ".join(map(_all_but_inner, rows.arguments.values()))
        return f"{before} -> {', '.join(map(_all_but_inner, rows.results))}"

    return rule


def _all_but_inner(inner: int | None) -> str:
    return WHOLE if inner is None else " ".join([REST, *[WHOLE] * inner])
