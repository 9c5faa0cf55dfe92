"""Recordings of a call's operators, and programs that run them again without Python.

A call that is repeated at other positions, such as a model's for the next token, is recorded three
times. Where the recordings differ in integers only, and these lie on lines, the operators of any
further call are known: a `foo_ops._C.Program` runs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foo_ops._C import Number, Program, Register
from foo_ops.compat import OpOverload, TorchDispatchMode, no_dispatch

PLAIN = (Tensor, nn.Parameter)
READS = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
}
"""Functions by which Python sees the numbers of a tensor without an operator."""


class NotRecordedError(Exception):
    """A call cannot become a program; the message is the reason."""


# ------------------------------------------------------------------------------------- recordings


class Name(NamedTuple):
    """A tensor in a recording: an input or a constant by its number, or a result by its call."""

    kind: str
    number: int
    place: int = 0


class Layout(NamedTuple):
    """Sizes, strides and offset of a view, and the name and strides of its base."""

    base: Name
    base_strides: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass
class Call:
    """An operator's call. Tensors are replaced by their names.

    Attributes:
        results: for each result a name, a list of names, None if the tensor is known by another
            name, or the value itself.
        views: the layouts of results that are views of computed tensors, or None.
        is_sum: whether it adds two contiguous tensors of one shape and dtype.
    """

    operator: OpOverload
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    results: tuple[Any, ...] = ()
    views: list[Layout] | None = None
    is_sum: bool = False

    @property
    def writes(self) -> bool:
        return bool(self.operator._schema.is_mutable)

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.operator.tags


class Recording(TorchDispatchMode):
    """The operators of one call, in order.

    Nothing is ever refused while the call runs; `failure` says why it cannot become a program.

    Attributes:
        constants: tensors that are neither inputs nor results.
    """

    supports_higher_order_operators = True

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.constants: list[Tensor] = []
        self.failure: str | None = None
        self.names: dict[int, Name] = {}
        self.addresses: dict[Name, int] = {}
        """The addresses of the storages of named tensors."""
        self.held: list[Tensor] = []
        """Keeps tensors alive, so that no other gets the same id."""
        self.computed: dict[int, tuple[Name, Tensor]] = {}
        """Results whose memory the call has allocated, by the address of their storage."""
        self.reads = Reads(self)
        for number, tensor in enumerate(inputs):
            self.note(tensor, Name("input", number))

    def __enter__(self) -> Recording:
        self.reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self.reads.__exit__(*details)

    def release(self) -> None:
        """Let go of the tensors that are no constants, once the call has ended."""
        self.names.clear()
        self.held.clear()
        self.computed.clear()

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def note(self, tensor: Tensor, name: Name) -> None:
        if self.names.setdefault(id(tensor), name) is name:
            self.addresses[name] = address_of(tensor)
        self.held.append(tensor)

    def name_of(self, tensor: Tensor) -> Name:
        name = self.names.get(id(tensor))
        if name is None:
            if type(tensor) not in PLAIN:
                self.fail(f"it uses a tensor of class {type(tensor).__name__}")
            name = Name("constant", len(self.constants))
            self.constants.append(tensor)
            self.note(tensor, name)
        return name

    def named(self, value: Any) -> Any:
        """Replace the tensors in an argument by their names."""
        if isinstance(value, Tensor):
            return self.name_of(value)
        if isinstance(value, (list, tuple)):
            return [self.named(it) for it in value]
        return value

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if self.failure is not None:
            return operator(*arguments, **keywords)
        if not isinstance(operator, OpOverload):
            self.fail(f"it calls {operator}")
            return operator(*arguments, **keywords)
        named = {name: self.named(it) for name, it in keywords.items()}
        call = Call(operator, tuple(map(self.named, arguments)), named)
        given = list(tensors_in((arguments, keywords)))
        made = operator(*arguments, **keywords)
        call.is_sum = is_sum(operator, arguments, keywords, made)
        results = made if isinstance(made, tuple) else () if made is None else (made,)
        number = len(self.calls)
        call.results = tuple(self.result(it, number, place) for place, it in enumerate(results))
        if not call.writes and None not in call.results:
            call.views = self.views_of(list(tensors_in(results)), given)
        self.calls.append(call)
        return made

    def result(self, value: Any, number: int, place: int) -> Any:
        if isinstance(value, Tensor):
            if id(value) in self.names:
                return None
            name = Name("result", number, place)
            self.note(value, name)
            return name
        if isinstance(value, (list, tuple)):
            # Lists are the only result where they occur, so places count their elements.
            return [self.result(it, number, nth) for nth, it in enumerate(value)]
        return value

    def views_of(self, results: list[Tensor], given: list[Tensor]) -> list[Layout] | None:
        """Return the layouts of results that all are views of one computed tensor."""
        outside = {address_of(it) for it in given} - self.computed.keys()
        layouts = []
        for it in results:
            name, base = self.computed.setdefault(address_of(it), (self.names[id(it)], it))
            if address_of(it) in outside:
                del self.computed[address_of(it)]
                return None
            if base is not it and base.dtype == it.dtype and is_simple(it) and is_simple(base):
                offset = int(it.storage_offset() - base.storage_offset())
                layouts.append(Layout(name, base.stride(), tuple(it.shape), it.stride(), offset))
        return layouts if len(layouts) == len(results) > 0 else None


def address_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def is_sum(operator: OpOverload, arguments: Any, keywords: Any, result: Any) -> bool:
    if operator is not torch.ops.aten.add.Tensor or keywords:
        return False
    tensors = (*arguments, result)
    are_alike = all(isinstance(it, Tensor) and it.shape == result.shape for it in tensors)
    has_one_dtype = are_alike and len({it.dtype for it in tensors}) == 1
    return has_one_dtype and all(it.is_contiguous() for it in tensors)


def is_simple(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for it in value:
            yield from tensors_in(it)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


class Reads(TorchFunctionMode):
    """Notices functions that give numbers of tensors to Python."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function in READS:
            self.recording.fail(f"it reads a tensor by {function.__name__}")
        return function(*arguments, **(keywords or {}))


# --------------------------------------------------------------------------------------- programs


class Line(NamedTuple):
    """The integers that recordings have at one place, as a function of the position."""

    start: int
    step: int

    @classmethod
    def through(cls, one: int, other: int, positions: tuple[int, int]) -> Line:
        """Return the line through two integers at two positions."""
        step, rest = divmod(other - one, positions[1] - positions[0])
        if rest:
            raise NotRecordedError("a number does not grow with the position")
        return cls(one - step * positions[0], step)

    def at(self, position: int) -> int:
        return self.start + self.step * position


def merged(one: Any, other: Any, positions: tuple[int, int]) -> Any:
    """Merge a value of two recordings: integers that differ become a `Line`."""
    if type(one) is not type(other):
        raise NotRecordedError("its operators depend on more than the position")
    if isinstance(one, Name):
        if one != other:
            raise NotRecordedError("its tensors change places")
        return one
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            raise NotRecordedError("its lists change their lengths")
        parts = [merged(*pair, positions) for pair in zip(one, other)]
        return Layout(*parts) if isinstance(one, Layout) else parts
    if isinstance(one, dict):
        if one.keys() != other.keys():
            raise NotRecordedError("its operators change their arguments")
        return {name: merged(it, other[name], positions) for name, it in one.items()}
    if type(one) is int and one != other:
        return Line.through(one, other, positions)
    if one is not other and one != other:
        raise NotRecordedError("a number changes, and is no integer")
    return one


def holds_at(line: Any, value: Any, position: int) -> bool:
    """Whether a further recording has the value that `merged` predicts."""
    if isinstance(line, Line):
        return type(value) is int and line.at(position) == value
    if isinstance(line, Name):
        return bool(line == value)
    if isinstance(line, (list, tuple)):
        return (
            isinstance(value, (list, tuple))
            and len(line) == len(value)
            and all(holds_at(*pair, position) for pair in zip(line, value))
        )
    if isinstance(line, dict):
        return line.keys() == value.keys() and all(
            holds_at(it, value[name], position) for name, it in line.items()
        )
    return type(line) is type(value) and bool(line is value or line == value)


def is_same_constant(one: Tensor, other: Tensor) -> bool:
    """Whether a constant is the same tensor in two recordings, or a new one with equal numbers."""
    if one is other:
        return True
    with no_dispatch():
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def parts_of(call: Call) -> tuple[Any, ...]:
    return call.arguments, call.keywords, call.results, call.views


def merged_all(values: Sequence[Any], positions: Sequence[int]) -> Any:
    """Merge the values of three or more recordings; the others have to confirm the first two.

    Raises:
        NotRecordedError: if they differ in more than integers that grow with the position.
    """
    lines = merged(values[0], values[1], (positions[0], positions[1]))
    for value, position in zip(values[2:], positions[2:]):
        if not holds_at(lines, value, position):
            raise NotRecordedError("a number does not grow with the position")
    return lines


def merged_calls(recordings: Sequence[Recording], positions: Sequence[int]) -> list[Call]:
    """Return the calls of recordings, with lines in place of integers."""
    first, *_ = recordings
    for recording in recordings:
        if recording.failure is not None:
            raise NotRecordedError(recording.failure)
        if len(recording.calls) != len(first.calls):
            raise NotRecordedError("the number of its operators changes")
        if len(recording.constants) != len(first.constants):
            raise NotRecordedError("the number of its tensors changes")
        if not all(map(is_same_constant, first.constants, recording.constants)):
            raise NotRecordedError("it makes tensors from numbers that change")
    check_written(recordings)
    calls = []
    for same in zip(*(it.calls for it in recordings)):
        operator = same[0].operator
        if any(it.operator is not operator for it in same):
            raise NotRecordedError("its operators change")
        arguments, keywords, results, views = merged_all([*map(parts_of, same)], positions)
        is_sum = all(it.is_sum for it in same)
        calls.append(Call(operator, tuple(arguments), keywords, tuple(results), views, is_sum))
    return calls


def without_constants(
    calls: Sequence[Call], addresses: dict[Name, int], outputs: Sequence[Name]
) -> tuple[list[Call], dict[Name, Tensor]]:
    """Compute what depends on nothing, such as ``arange(1)``, and that nobody writes or receives.

    Returns:
        The other calls, and the computed tensors.
    """
    changed = {addresses[it] for call in calls for it in written_by(call)}
    changed |= {addresses[it] for it in outputs}
    left: list[Call] = []
    computed: dict[Name, Tensor] = {}
    for call in calls:
        given = [call.arguments, call.keywords]
        is_known = computed.keys() >= set(names_in(given)) and not has_lines(given)
        results = [it for it in call.results if isinstance(it, Name)]
        is_kept = len(results) == len(call.results) == 1 and addresses[results[0]] not in changed
        if is_known and is_kept and not (call.writes or call.is_random):
            arguments, keywords = filled(given, computed)
            computed[results[0]] = call.operator(*arguments, **keywords)
        else:
            left.append(call)
    return left, computed


def has_lines(value: Any) -> bool:
    if isinstance(value, dict):
        return has_lines(list(value.values()))
    is_list = isinstance(value, (list, tuple)) and not isinstance(value, (Line, Name))
    return isinstance(value, Line) or (is_list and any(map(has_lines, value)))


def filled(value: Any, tensors: dict[Name, Tensor]) -> Any:
    """Replace names by their tensors."""
    if isinstance(value, Name):
        return tensors[value]
    if isinstance(value, dict):
        return {name: filled(it, tensors) for name, it in value.items()}
    if isinstance(value, (list, tuple)):
        return [filled(it, tensors) for it in value]
    return value


def with_fused_norms(calls: Sequence[Call]) -> list[Call]:
    """Let one operator add a residual and normalise the sum, with the same bits as two."""
    norms = {
        torch.ops.foo.rms_norm.default: torch.ops.foo.add_rms_norm.default,
        torch.ops.foo.layer_norm.default: torch.ops.foo.add_layer_norm.default,
    }
    result: list[Call] = []
    for call in calls:
        before = result[-1] if result else None
        if (
            before is not None
            and before.is_sum
            and call.operator in norms
            and call.arguments[0] == before.results[0]
        ):
            arguments = (*before.arguments, *call.arguments[1:])
            results = (*call.results, *before.results)
            result[-1] = Call(norms[call.operator], arguments, call.keywords, results)
        else:
            result.append(call)
    return result


def with_adjacent_products(calls: Sequence[Call]) -> list[Call]:
    """Move products to earlier ones of the same input: a program runs these in one loop."""
    result: list[Call] = []
    for call in calls:
        result.insert(place_of_product(call, result) if is_product(call) else len(result), call)
    return result


def is_product(call: Call) -> bool:
    return str(call.operator).startswith("foo.linear") and not call.writes


def place_of_product(product: Call, before: list[Call]) -> int:
    """Return the place behind a product of the same input, or the end."""
    given = set(names_in((product.arguments, product.keywords)))
    for place in reversed(range(len(before))):
        call = before[place]
        if is_product(call) and call.arguments[0] == product.arguments[0]:
            return place + 1
        if call.writes or not given.isdisjoint(names_in(call.results)):
            break
    return len(before)


def check_written(recordings: Sequence[Recording]) -> None:
    """Require that constants which are written are the same tensors in all recordings."""
    first, *others = recordings
    for name in {it for call in first.calls for it in written_by(call)}:
        if name.kind == "constant":
            tensor = first.constants[name.number]
            if any(it.constants[name.number] is not tensor for it in others):
                raise NotRecordedError("it writes to a tensor that is replaced")


def names_in(value: Any) -> Iterator[Name]:
    if isinstance(value, Name):
        yield value
    elif isinstance(value, (list, tuple)) and not isinstance(value, Line):
        for it in value:
            yield from names_in(it)
    elif isinstance(value, dict):
        yield from names_in(list(value.values()))


def is_guard(result: Any) -> bool:
    """Whether Python has received a number, by which it may have decided what to call next."""
    if result is None or isinstance(result, Name):
        return False
    return not (isinstance(result, list) and all(map(is_tensor_result, result)))


def is_tensor_result(result: Any) -> bool:
    return result is None or isinstance(result, Name)


def in_order(calls: list[Call], addresses: dict[Name, int]) -> list[int]:
    """Return the calls' numbers, with those that guards depend on first.

    A guard that fails then has changed nothing yet.
    """
    makers = {name: number for number, call in enumerate(calls) for name in names_in(call.results)}
    first_write: dict[int, int] = {}
    for number, call in enumerate(calls):
        for name in written_by(call):
            first_write.setdefault(addresses[name], number)
    first: dict[int, None] = {}

    def add(number: int) -> None:
        if number in first:
            return
        call = calls[number]
        given = list(names_in((call.arguments, call.keywords)))
        is_late = any(first_write.get(addresses[it], number) < number for it in given)
        if call.writes or call.is_random or is_late:
            raise NotRecordedError("it reads numbers after it has written some")
        for name in given:
            if name in makers:
                add(makers[name])
        first[number] = None

    for number, call in enumerate(calls):
        if any(map(is_guard, call.results)):
            add(number)
    return [*first, *(number for number in range(len(calls)) if number not in first)]


def written_by(call: Call) -> list[Name]:
    """Return the tensors that a call writes."""
    if not call.writes:
        return []
    given = [*call.arguments]
    written: list[Name] = []
    for place, parameter in enumerate(call.operator._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            value = given[place] if place < len(given) else call.keywords.get(parameter.name)
            written += names_in(value)
    return written


class Builder:
    """Writes merged calls as instructions of a `foo_ops._C.Program`."""

    def __init__(self, calls: list[Call], addresses: dict[Name, int]) -> None:
        self.calls = calls
        self.addresses = addresses
        self.registers: dict[Name, int] = {}

    def register(self, name: Name) -> int:
        return self.registers.setdefault(name, len(self.registers))

    def number(self, value: int | Line) -> Number:
        return Number(*value) if isinstance(value, Line) else Number(value, 0)

    def value(self, value: Any) -> Any:
        if isinstance(value, Name):
            return Register(self.register(value))
        if isinstance(value, Line):
            return Number(*value)
        if isinstance(value, (list, tuple)):
            return [self.value(it) for it in value]
        return value

    def result(self, value: Any, is_used: set[Name]) -> Any:
        if isinstance(value, Name):
            return Register(self.register(value)) if value in is_used else None
        if value is None:
            return None
        if is_guard(value):
            return self.value(value)
        if any(it is None for it in value):
            raise NotRecordedError("an operator returns a list of its arguments")
        return [self.register(it) for it in value]

    def instructions(self, outputs: Sequence[Name]) -> list[tuple[Any, ...]]:
        """Return the instructions; each begins with the registers that nothing reads afterwards."""
        used = set(outputs)
        wanted = []
        for number in reversed(in_order(self.calls, self.addresses)):
            call = self.calls[number]
            names = set(names_in(call.results))
            if call.writes or call.is_random or names & used or any(map(is_guard, call.results)):
                read = self.read_by(call)
                ends = [it for it in (read | names) - used if it.kind == "result"]
                wanted.append((call, ends, frozenset(used | read)))
                used |= read
        made = []
        for call, ends, is_used in reversed(wanted):
            for instruction in self.instructions_of(call, set(is_used)):
                made.append([[], *instruction])
            made[-1][0] = [
                self.register(it) for it in ends if it in self.registers or it in is_used
            ]
        return [tuple(it) for it in made]

    def read_by(self, call: Call) -> set[Name]:
        if call.views is not None:
            return {it.base for it in call.views}
        return set(names_in((call.arguments, call.keywords)))

    def instructions_of(self, call: Call, is_used: set[Name]) -> Iterator[list[Any]]:
        if call.views is not None:
            for name, view in zip(names_in(call.results), call.views):
                if name in is_used:
                    yield [
                        Register(self.register(view.base)),
                        [*map(self.number, view.base_strides)],
                        Register(self.register(name)),
                        [*map(self.number, view.sizes)],
                        [*map(self.number, view.strides)],
                        self.number(view.offset),
                    ]
            return
        schema = call.operator._schema
        arguments = tuple(map(self.value, call.arguments))
        keywords = {name: self.value(it) for name, it in call.keywords.items()}
        results = tuple(self.result(it, is_used) for it in call.results)
        yield [schema.name, schema.overload_name, (arguments, keywords, results)]


def make_program(
    recordings: Sequence[Recording], positions: Sequence[int], outputs: Sequence[Name]
) -> tuple[Program, list[int]]:
    """Make the program of a call from recordings of it.

    Args:
        recordings: three or more, each with the same inputs.
        positions: a different integer for each recording, such as the length of a cache.
        outputs: the tensors that the program is to return.

    Returns:
        The program, and the numbers of the inputs that it reads.

    Raises:
        NotRecordedError: if they differ in more than integers that grow with the position.
    """
    addresses = recordings[0].addresses
    calls, computed = without_constants(merged_calls(recordings, positions), addresses, outputs)
    builder = Builder(with_adjacent_products(with_fused_norms(calls)), addresses)
    instructions = builder.instructions(outputs)
    returned = [builder.register(it) for it in outputs]
    constants, inputs = [], {}
    for name, register in builder.registers.items():
        if name in computed:
            constants.append((register, computed[name]))
        elif name.kind == "constant":
            constants.append((register, recordings[-1].constants[name.number]))
        elif name.kind == "input":
            inputs[name.number] = register
    inputs = dict(sorted(inputs.items()))
    program = Program(
        len(builder.registers), list(inputs.values()), returned, constants, instructions
    )
    return program, list(inputs)
