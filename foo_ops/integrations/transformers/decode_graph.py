"""A model's call for one token, or a few, recorded once and then run without Python.

A model that decodes calls the same operators for each token; between them, Python takes more time
than the operators of a small model. So three steps are recorded, and a program runs the others
(`foo_ops.integrations.transformers.recording`). What the step changes in the cache's objects, such
as lengths and views, is recorded with it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput
from transformers.utils.generic import GeneralInterface

from foo_ops._C import (
    Changes,
    Loop,
    Number,
    Program,
    Progress,
    Sequences,
    Snapshot,
    are_calls_seen,
)
from foo_ops.compat import has_any_global_hook
from foo_ops.integrations.transformers import cache as foo_cache
from foo_ops.integrations.transformers.cache_state import (
    SIZES,
    UNLIMITED,
    VALUES,
    Description,
    State,
)
from foo_ops.integrations.transformers.generation import (
    LOGITS,
    TOKENS,
    FooGenerator,
    Values,
    chosen,
    step,
)
from foo_ops.integrations.transformers.loss import FooLanguageModel
from foo_ops.integrations.transformers.recording import (
    Line,
    Name,
    NotRecordedError,
    Recording,
    make_program,
    merged_all,
)
from foo_ops.integrations.transformers.replacement import (
    Replacement,
    has_own_forward,
    is_replaced,
    put_back,
    replace,
)

MOST_TOKENS = 16
"""Tokens of a call that may run as a graph, such as drafts that are checked at once."""
STEPS = 3
"""Recorded steps from which a program is made: two for the lines, one to check them."""
MOST_FAILURES = 6
"""After as many recordings in vain, one after the other, such calls are not recorded again."""
MOST_VARIANTS = 4
"""Graphs of the same calls, whose operators depend on what a tensor contains, or of steps whose
tokens are fewer than their cache's."""
MOST_GRAPHS = 16
"""Graphs of a kind of calls that are kept, such as for several lengths of static caches."""
MOST_KEYS = 64
"""Kinds of calls whose graphs are kept, and as many whose steps are."""

LIBRARIES = {"foo_ops", "peft", "torch", "transformers"}
"""Modules of other libraries may do more in Python than call operators."""

SHARED_FILES = ("transformers.masking_utils", "transformers.integrations.moe")
"""Files with tables of functions that all models call."""

# ------------------------------------------------------------------------------------- one token


class Call:
    """A call for a few tokens: of a model's forward, or of a step of `generate`.

    Attributes:
        own: is called where no graph serves.
        arguments: one of them is the cache.
        given: describes the others.
        batch, count: the sequences, and the tokens of each.
        sequences: to which a step's tokens are appended; None for a forward.
        most: tokens that may be appended at once, by a graph.
    """

    def __init__(
        self,
        own: Callable[..., Any],
        arguments: Values,
        cache: Any,
        shape: Sequence[int],
        sequences: Sequences | None = None,
        most: int = 1,
    ) -> None:
        self.own = own
        self.arguments = arguments
        self.cache = cache
        self.given = described(arguments, cache)
        self.batch, self.count = shape[0], shape[-1]
        self.sequences = sequences
        self.most = most

    def following(self, output: Any) -> Description | None:
        """Describe the arguments of the next step of `generate`."""
        if self.sequences is None:
            return None
        tokens = self.arguments[TOKENS]
        longer = {TOKENS: tokens.new_empty(len(tokens), tokens.shape[1] + 1)}
        values = {name: it for name, it in output.items() if name != LOGITS}
        return described(longer | values, self.cache)


def described(arguments: Values, cache: Any) -> Description:
    """Describe the arguments of a call beside its cache."""
    description = Description(VALUES)
    description.add({name: it for name, it in arguments.items() if it is not cache})
    return description


class Step(NamedTuple):
    """A recorded call for up to 16 tokens (`MOST_TOKENS`).

    Attributes:
        position: the length of the cache before it.
        parts: descriptions of the arguments and of the cache's values, the values that the call has
            changed, the class and the attributes of its output, and the tensors among the next
            step's arguments, if it is a step of `generate`. In the last three, tensors are names.
        following: the description of these arguments.
    """

    recording: Recording
    position: int
    parts: tuple[Any, ...]
    following: list[Any] | None


class Pattern:
    """A description that a call has to meet, with lines in place of integers that grow."""

    def __init__(self, atoms: list[Any]) -> None:
        self.lines = [(place, *it) for place, it in enumerate(atoms) if isinstance(it, Line)]
        self.atoms = [0 if isinstance(it, Line) else it for it in atoms]
        self.classes = [*map(type, self.atoms)]

    def holds(self, atoms: list[Any], position: int) -> bool:
        expected = self.atoms.copy()
        for place, start, slope in self.lines:
            expected[place] = start + slope * position
        return expected == atoms and [*map(type, atoms)] == self.classes


@dataclass
class Graph:
    """A program with all that it takes to call it in place of the model.

    Attributes:
        count: tokens of a call.
        tensors: the numbers of the arguments' tensors that the program reads.
        inputs: the numbers of the cache's tensors that the program reads.
        arguments, before: descriptions of the arguments and of the cache's values.
        changes: the changed values of the cache: outputs and lines.
        positions: the least and the first that is too large: in between, a cache's length is on
            the same side of all limits.
        next_inputs: the places among the inputs of tensors that are replaced, and their outputs.
        fields: the attributes of the output.
        loop: how a step's results become the next step's arguments; None if they may not.
    """

    program: Program
    count: int
    tensors: list[int]
    inputs: list[int]
    arguments: Pattern
    before: Pattern
    changes: dict[tuple[int, Any], Output | Line]
    positions: tuple[int, int]
    next_inputs: list[tuple[int, int]]
    output_class: Any
    fields: dict[str, Output | Given | None]
    loop: Loop | None


class Output(NamedTuple):
    """The number of a program's output, in place of the tensor."""

    number: int


@dataclass(frozen=True)
class Given:
    """The name of an argument, such as the cache, in place of its value."""

    name: str


class Binding:
    """A graph with the objects and the tensors of one cache.

    Attributes:
        positions: the lengths of the cache at which the graph serves it.
        snapshot: the values of the cache's objects after the last call.
        inputs: the cache's tensors that the program reads.
        length: the cache's length while the snapshot holds; None if it may be in a tensor.
    """

    def __init__(self, graph: Graph, state: State) -> None:
        self.graph = graph
        first, end = graph.positions
        self.positions = range(first, min(state.limit - graph.count + 1, end))
        self.snapshot = Snapshot(state.owners, [])
        self.inputs = [state.tensors[it] for it in graph.inputs]
        self.is_inference = torch.is_inference_mode_enabled()
        self.has_length = all(it.is_floating_point() for it in state.tensors)
        self.length: int | None = None
        outputs, integers = [], []
        for (owner, key), change in graph.changes.items():
            place = state.owners[owner], key
            if isinstance(change, Output):
                outputs.append((*place, change.number))
            else:
                integers.append((*place, Number(*change)))
        # 24 layers have 100 changes for each token.
        self.changes = Changes(outputs, integers)

    def fits(self, given: Description, position: int) -> bool:
        return (
            self.is_inference is torch.is_inference_mode_enabled()
            and self.graph.arguments.holds(given.atoms, position)
        )

    def run(self, call: Call, position: int) -> Any:
        """Return the output of a call; None if memory is full, or a guard has another value.

        A step of `generate` is followed by others, whose tokens are appended, too.
        """
        if position not in self.positions:
            return None
        graph = self.graph
        inputs = [*(call.given.tensors[it] for it in graph.tensors), *self.inputs]
        if call.sequences is None or graph.loop is None:
            outputs = graph.program.run(position, inputs)
            if outputs is not None:
                self.write(outputs, position)
        else:
            outputs = self.run_loop(graph.loop, call, call.sequences, inputs, position)
        return self.output(outputs, call.arguments) if outputs else None

    def run_loop(
        self, loop: Loop, call: Call, sequences: Sequences, inputs: list[Tensor], position: int
    ) -> list[Tensor]:
        """Return the outputs of the last step. The cache is as it leaves it, also if one raises."""
        most = min(call.most, self.positions.stop - position)
        progress = Progress()
        try:
            self.graph.program.run_loop(loop, position, inputs, sequences, most, progress)
        finally:
            if progress.count:
                self.write(progress.outputs, position + progress.count - 1)
        return progress.outputs

    def output(self, outputs: list[Tensor], arguments: Values) -> Any:
        values = {
            name: outputs[it.number] if isinstance(it, Output) else it and arguments[it.name]
            for name, it in self.graph.fields.items()
        }
        kind = self.graph.output_class
        if kind is dict:
            return values
        output = kind.__new__(kind)
        vars(output).update(values)
        for name, value in values.items():
            if value is not None:
                OrderedDict.__setitem__(output, name, value)
        return output

    def write(self, outputs: list[Tensor], position: int) -> None:
        """Change the cache's objects as the recorded call has."""
        self.changes.write(outputs, position)
        for place, number in self.graph.next_inputs:
            self.inputs[place] = outputs[number]
        self.snapshot.take()
        if self.has_length:
            self.length = position + self.graph.count


# ------------------------------------------------------------------------------------- the model


def integers_of(value: Any, name: str = "") -> Iterator[int]:
    """Return the integers of a configuration that may be limits of a sequence's length."""
    if type(value) is int and name not in SIZES and not name.endswith("token_id"):
        yield value
    elif isinstance(value, Mapping):
        for key, it in value.items():
            yield from integers_of(it, str(key))
    elif isinstance(value, (list, tuple)):
        for it in value:
            yield from integers_of(it, name)


def limits_of(integers: Iterable[int]) -> list[int]:
    """Return the lengths at which a comparison with one of the integers may change."""
    return sorted({it + near for it in integers if it > 1 for near in (-1, 0, 1)})


def around(position: int, count: int, limits: list[int]) -> tuple[int, int]:
    """Return the first position between the same limits, and the first with tokens beyond."""
    place = bisect_right(limits, position)
    return limits[place - 1] if place else 0, [*limits, UNLIMITED][place] - count + 1


def containers_of(value: Any, depth: int = 2) -> Iterator[Any]:
    """Return a dictionary or list, and those that it holds."""
    if isinstance(value, (dict, list)):
        yield value
        if depth:
            for it in value.values() if isinstance(value, dict) else value:
                yield from containers_of(it, depth - 1)


def code_of(model: nn.Module) -> list[Any]:
    """Return the classes of a model, their files' names, and the tables of functions in these."""
    classes = {base for it in model.modules() for base in type(it).__mro__} - {object}
    files = {it.__module__ for it in classes if it.__module__.startswith("transformers.")}
    names = [vars(sys.modules[it]) for it in {*files, *SHARED_FILES} if it in sys.modules]
    tables = [it for values in names for it in values.values() if isinstance(it, GeneralInterface)]
    mappings = [it for each in tables for it in (each._local_mapping, each._global_mapping)]
    return [*classes, *names, *mappings]


class Key(NamedTuple):
    """The calls that a graph may serve."""

    is_inference: bool
    is_step: bool
    """Whether it is a step of `generate`, or else a model's forward."""
    cache: type
    batch: int
    token_count: int
    """Tokens of each sequence."""
    arguments: tuple[str, ...]
    region: int
    """The number of the configuration's integers that are smaller than the length of the cache."""


class Graphs:
    """The graphs of a model.

    Attributes:
        model: the model; copies of its attributes are not it.
        snapshot: the attributes of all modules, with the contents of lists and dictionaries, and
            the code that they find by its name.
        reason: why the model is not recorded, or None.
        failures: how often recordings have failed in a row, and why.
        idle: how many predecessors in a row have run nothing before the model changed.
    """

    def __init__(self, model: Any, idle: int = 0) -> None:
        self.model = weakref.ref(model)
        self.idle = idle
        self.has_run = False
        changes = "its modules change with each call" if idle >= MOST_FAILURES else None
        self.reason = changes or reason_of(model)
        self.graphs: OrderedDict[Key, list[Graph]] = OrderedDict()
        self.failures: dict[Key, list[str]] = {}
        self.steps: OrderedDict[Key, list[Step]] = OrderedDict()
        self.bindings: WeakKeyDictionary[Cache, Binding] = WeakKeyDictionary()
        self.calls: Any = WeakIdKeyDictionary()
        values = [getattr(it, "config", None) for it in model.modules()]
        configs = {id(it): it for it in values if isinstance(it, PreTrainedConfig)}.values()
        self.limits = limits_of(it for config in configs for it in integers_of(config.to_dict()))
        owners = [vars(it) for it in (*model.modules(), *configs)]
        containers = [it for owner in owners for it in containers_of(owner)]
        containers += code_of(model)
        self.snapshot = Snapshot(
            list({id(it): it for it in containers}.values()), list(model.parameters())
        )

    def is_of(self, model: Any) -> bool:
        return self.model() is model and (self.idle >= MOST_FAILURES or self.snapshot.holds())

    def binding_of(self, cache: Any) -> Binding | None:
        """Return the graph that has run this cache's last call, if nothing has changed it since."""
        binding = self.bindings.get(cache) if isinstance(cache, Cache) else None
        return binding if binding is not None and binding.snapshot.holds() else None

    def position_of(self, call: Call) -> int:
        """Return the length of a cache; or else that of the tokens, or the number of the call."""
        cache = call.cache
        try:
            return int(cache.get_seq_length())
        except (AttributeError, ValueError):  # all of its layers are recurrent
            if call.sequences is not None:
                return call.sequences.length
            # Lists cannot be referenced weakly.
            counted = cache[0] if isinstance(cache, list) else cache
            self.calls[counted] = self.calls.get(counted, 0) + 1
            return int(self.calls[counted])

    def has_enough_offsets(self, key: Key, call: Call, position: int) -> bool:
        """Whether a step has fewer tokens than its cache, as after embeddings, and no graph.

        Each length of embeddings would be another graph of steps; the model's forward has one for
        all of them.
        """
        # Caches without a length have that of the tokens.
        is_usual = call.sequences is None or call.sequences.length - position in (0, 1)
        graphs = self.graphs.get(key, ())
        if is_usual or len(graphs) < MOST_VARIANTS:
            return False
        return not any(it.arguments.holds(call.given.atoms, position) for it in graphs)

    def add(self, key: Key, graph: Graph) -> None:
        self.failures.pop(key, None)
        self.graphs[key] = [*self.graphs.get(key, ()), graph][-MOST_GRAPHS:]
        if len(self.graphs) > MOST_KEYS:
            self.graphs.popitem(last=False)

    def keep(self, key: Key, steps: list[Step]) -> None:
        self.steps[key] = steps
        if len(self.steps) > MOST_KEYS:
            self.steps.popitem(last=False)


def reason_of(model: nn.Module) -> str | None:
    """Return why the steps of a model are not recorded, or None."""
    for name, module in model.named_modules():
        library = type(module).__module__.partition(".")[0]
        if library not in LIBRARIES:
            return f"{name or 'the model'} is a {type(module).__name__} of {library}"
        if has_own_forward(module):
            return f"the forward of {name or 'the model'} has been replaced by another one"
        if module is not model and has_foreign_hooks(module):
            return f"{name} has hooks"
    return None


def has_foreign_hooks(module: Any) -> bool:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(it not in foo_cache.HOOKS.values() for it in hooks)


def has_foreign_step(model: Any) -> bool:
    """Whether code of others runs beside a model's forward in each step of `generate`."""
    functions = model.prepare_inputs_for_generation, model._update_model_kwargs_for_generation
    libraries = {it.__module__.partition(".")[0] for it in functions}
    return not libraries <= LIBRARIES or has_foreign_hooks(model)


GRAPHS = "_foo_graphs"
CACHES = ("past_key_values", "cache_params", "state")
"""Names of the argument that is a cache."""


def cache_of(arguments: Values) -> Any:
    """Return the argument that is a cache, or the list of tensors that Rwkv has for one."""
    value = next((arguments[it] for it in CACHES if arguments.get(it) is not None), None)
    is_cache = isinstance(value, Cache) or (
        type(value) is list and value != [] and all(type(it) is Tensor for it in value)
    )
    return value if is_cache else None


def is_unusual() -> bool:
    """Whether anything beside the operators' results may depend on the call."""
    return are_calls_seen() or has_any_global_hook()


class FooDecoder(FooGenerator):
    """Replaces models that generate: calls for up to 16 further tokens run as a program."""

    training: bool
    parameter_names: ClassVar[list[str]]

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return isinstance(module, PreTrainedModel) and module.can_generate()

    @classmethod
    def attributes(cls, original: type[nn.Module]) -> dict[str, Any]:
        names = list(inspect.signature(original.forward).parameters)[1:]

        # Trainers and `generate` inspect the names of a model's arguments.
        @wraps(original.forward)
        def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
            return cls.forward(self, *arguments, **keywords)

        return {"forward": forward, "parameter_names": names}

    @classmethod
    def forget(cls, module: nn.Module) -> None:
        vars(module).pop(GRAPHS, None)

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: it for name, it in super().copied(state).items() if name != GRAPHS}

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        own: Any = super().forward  # type: ignore[misc]
        if torch.compiler.is_compiling() or self.training or is_unusual():
            return own(*arguments, **keywords)
        named = {**dict(zip(self.parameter_names, arguments)), **keywords}
        cache = cache_of(named)
        tokens = named.get("decoder_input_ids", named.get("input_ids"))
        if (
            cache is None
            or not isinstance(tokens, Tensor)
            or not 0 < tokens.shape[-1] <= MOST_TOKENS
        ):
            return own(*arguments, **keywords)
        return decode(self, Call(own, named, cache, tokens.shape))

    def append_tokens(self, sequences: Sequences, values: Values, most: int) -> Values:
        cache = cache_of(values)
        if self.training or cache is None or is_unusual() or has_foreign_step(self):
            return super().append_tokens(sequences, values, most)
        tokens = sequences.tokens()
        call = Call(
            *(partial(step, self), {TOKENS: tokens, **values}, cache, (len(tokens), 1)),
            *(sequences, most),
        )
        return chosen(sequences, decode(self, call), tokens.shape[1])


class FooDecodingLanguageModel(FooDecoder, FooLanguageModel):
    """The same for models that compute a loss, too."""


def decode(model: Any, call: Call) -> Any:
    """Answer a call for a few tokens: by a graph if there is one, and else as the model does."""
    known, cache = graphs_of(model), call.cache
    binding = known.binding_of(cache)
    length = None if binding is None else binding.length
    position = known.position_of(call) if length is None else length
    if binding is not None and binding.fits(call.given, position):
        output = binding.run(call, position)
        if output is not None:
            return output
    region = bisect_right(known.limits, position)
    is_cut = region < bisect_right(known.limits, position + call.count - 1)
    if known.reason or not position or is_cut or not call.given.is_known:
        return call.own(**call.arguments)
    key = Key(
        torch.is_inference_mode_enabled(),
        call.sequences is not None,
        type(cache),
        call.batch,
        call.count,
        tuple(call.arguments),
        region,
    )
    has_failed = len(known.failures.get(key, ())) >= MOST_FAILURES
    if (has_failed and key not in known.graphs) or known.has_enough_offsets(key, call, position):
        return call.own(**call.arguments)
    if isinstance(cache, Cache):
        foo_cache.make_room(cache, call.count)
    state = State(cache)
    output, misses = run(known, key, call, state, position)
    if output is not None:
        return output
    if misses >= MOST_VARIANTS or has_failed:
        return call.own(**call.arguments)
    return record(known, key, call, state, position)


def graphs_of(model: Any) -> Graphs:
    known = vars(model).get(GRAPHS)
    if known is not None and known.is_of(model):
        return known
    idle = 0 if known is None or known.has_run or known.model() is not model else known.idle + 1
    known = vars(model)[GRAPHS] = Graphs(model, idle)
    known.snapshot.take()  # it includes this attribute
    return known


# ------------------------------------------------------------------------------------------- run


def run(known: Graphs, key: Key, call: Call, state: State, position: int) -> tuple[Any, int]:
    """Return the output of a graph that fits the call, or None, and how many graphs have missed.

    A miss is a graph that fits but for a number that Python has read from a tensor, or for memory
    of the cache that is full.
    """
    misses = 0
    for graph in known.graphs.get(key, ()):
        if not fits(graph, call.given, state, position):
            continue
        binding = Binding(graph, state)
        output = binding.run(call, position)
        if output is not None:
            if isinstance(call.cache, Cache):
                known.bindings[call.cache] = binding
            known.has_run = True
            return output, misses
        misses += 1
    return None, misses


def fits(graph: Graph, given: Description, state: State, position: int) -> bool:
    first, end = graph.positions
    return (
        first <= position < end
        and graph.arguments.holds(given.atoms, position)
        and graph.before.holds(state.atoms, position)
    )


# ---------------------------------------------------------------------------------------- record


def record(known: Graphs, key: Key, call: Call, state: State, position: int) -> Any:
    """Answer a call as the model does, and record its operators; after some, make a graph."""
    steps = known.steps.pop(key, [])
    if any(it.position == position for it in steps):
        known.steps[key] = steps
        return call.own(**call.arguments)
    with Recording([*call.given.tensors, *state.tensors]) as recording:
        output = call.own(**call.arguments)
    try:
        changes = changes_of(recording, state, State(call.cache))
        result = output_of(recording, output, call.arguments)
        following = call.following(output)
        names = None if following is None else names_of(recording, following.tensors)
        recording.release()
        if recording.failure is not None:
            raise NotRecordedError(recording.failure)
        parts = call.given.atoms, state.atoms, changes, result, names
        atoms = None if following is None else following.atoms
        steps = [*steps, Step(recording, position, parts, atoms)]
        if len(steps) == STEPS:
            known.add(key, make_graph(steps, key.token_count, len(call.given.tensors), state))
        else:
            known.keep(key, steps)
    except NotRecordedError as reason:
        known.failures.setdefault(key, []).append(str(reason))
    return output


def changes_of(recording: Recording, before: State, after: State) -> dict[tuple[int, Any], Any]:
    """Return the values that a call has changed, in which tensors are names."""
    if not before.is_known:
        raise NotRecordedError("its cache holds other values than tensors and numbers")
    if before.keys() != after.keys():
        raise NotRecordedError("it adds to the objects of its cache")
    if any(old is not new for old, new in zip(before.owners, after.owners)):
        raise NotRecordedError("it replaces objects of its cache")
    changed = {
        key: new
        for key, old, new in zip(after.keys(), before.values, after.values)
        if differ(old, new)
    }
    if any(type(it) is not int and not isinstance(it, Tensor) for it in changed.values()):
        raise NotRecordedError("it changes more than tensors and integers of its cache")
    return {key: named(recording, value) for key, value in changed.items()}


def differ(one: Any, other: Any) -> bool:
    if one is other:
        return False
    return isinstance(one, Tensor) or isinstance(other, Tensor) or bool(one != other)


def named(recording: Recording, value: Any) -> Any:
    return recording.name_of(value) if isinstance(value, Tensor) else value


def output_of(
    recording: Recording, output: Any, arguments: Values
) -> tuple[type, dict[str, Name | Given | None]]:
    """Return the class of an output and its attributes, with names in place of tensors."""
    if not isinstance(output, ModelOutput) and type(output) is not dict:
        raise NotRecordedError("its output is no ModelOutput")
    names = {id(it): name for name, it in arguments.items()}

    def field_of(value: Any) -> Name | Given | None:
        if value is None or isinstance(value, Tensor):
            return None if value is None else recording.name_of(value)
        if id(value) not in names:
            raise NotRecordedError("its output has more than tensors and arguments")
        return Given(names[id(value)])

    values = output if type(output) is dict else vars(output)
    return type(output), {name: field_of(value) for name, value in values.items()}


def names_of(recording: Recording, tensors: list[Tensor]) -> list[Name | None]:
    """Return the names of the next step's tensors, of which the first are all tokens so far."""
    return [None, *map(recording.name_of, tensors[1:])]


def make_graph(steps: list[Step], count: int, argument_count: int, state: State) -> Graph:
    """Make a graph from steps of a few tokens each.

    Raises:
        NotRecordedError: if they differ in more than integers that grow with the position.
    """
    positions = [it.position for it in steps]
    parts = merged_all([it.parts for it in steps], positions)
    arguments, before, changes, (output_class, fields), next_names = parts
    limits = limits_of(before[it] for it in state.integers if type(before[it]) is int)
    reached = [*positions, *(it + count - 1 for it in positions)]
    if len({bisect_right(limits, it) for it in reached}) > 1:
        raise NotRecordedError("it passes a limit of its cache")
    names = [it for it in (*changes.values(), *fields.values()) if isinstance(it, Name)]
    outputs = {name: Output(number) for number, name in enumerate(dict.fromkeys(names))}
    program, used = make_program([it.recording for it in steps], positions, list(outputs))
    inputs = [it - argument_count for it in used if it >= argument_count]
    keys = state.keys()
    places = {keys[value]: place for place, value in enumerate(state.values_of_tensors)}
    next_inputs = [
        (inputs.index(places[key]), outputs[it].number)
        for key, it in changes.items()
        if isinstance(it, Name) and places[key] in inputs
    ]
    graph = Graph(
        program=program,
        count=count,
        tensors=[it for it in used if it < argument_count],
        inputs=inputs,
        arguments=Pattern(arguments),
        before=Pattern(before),
        changes={
            key: outputs[it] if isinstance(it, Name) else as_line(it) for key, it in changes.items()
        },
        positions=around(positions[0], count, limits),
        next_inputs=next_inputs,
        output_class=output_class,
        fields={name: outputs.get(it, it) for name, it in fields.items()},
        loop=None,
    )
    if next_names is not None:
        graph.loop = loop_of(graph, steps, next_names, outputs)
    return graph


def loop_of(
    graph: Graph, steps: list[Step], names: list[Name | None], outputs: dict[Name, Output]
) -> Loop | None:
    """Return how a step's results become the next step's arguments; None if these may differ.

    Args:
        graph: of the step.
        steps: that were recorded.
        names: the next step's tensors.
        outputs: the program's outputs.
    """
    if not all(graph.arguments.holds(it.following or [], it.position + 1) for it in steps):
        return None
    feeds = [(len(graph.tensors) + place, number) for place, number in graph.next_inputs]
    for place, tensor in enumerate(graph.tensors):
        name = names[tensor]
        if name is None or name == Name("input", tensor):
            continue
        if name not in outputs:
            return None
        feeds.append((place, outputs[name].number))
    tokens = graph.tensors.index(0) if 0 in graph.tensors else None
    logits = graph.fields[LOGITS]
    return Loop(feeds, tokens, logits.number) if isinstance(logits, Output) else None


def as_line(value: Line | int) -> Line:
    return value if isinstance(value, Line) else Line(value, 0)


# ----------------------------------------------------------------------------------------- apply


LANGUAGE_MODELS: dict[tuple[bool, bool], type[Replacement]] = {
    (True, False): FooLanguageModel,
    (False, True): FooDecoder,
    (True, True): FooDecodingLanguageModel,
}
"""Replacements by whether they fuse the loss, and whether they run tokens as graphs."""


def replace_language_model(model: PreTrainedModel, fuses_loss: bool, has_graphs: bool) -> None:
    """Let a model fuse its loss and run tokens as graphs, beside what it does already."""
    kind: Any = type(model)
    present = kind.replacement if is_replaced(model) else None
    if present not in (None, *LANGUAGE_MODELS.values()):
        return
    fuses_loss = fuses_loss and FooLanguageModel.recognises(model)
    has_graphs = has_graphs and FooDecoder.recognises(model)
    wanted = LANGUAGE_MODELS.get(
        (
            fuses_loss or isinstance(model, FooLanguageModel),
            has_graphs or isinstance(model, FooDecoder),
        )
    )
    if wanted is not None and wanted is not present:
        put_back(model)
        replace(model, wanted)


def reason_of_no_graphs(model: nn.Module) -> str | None:
    """Return why the tokens of a model are not run as graphs, as far as calls have shown it."""
    known = vars(model).get(GRAPHS)
    if known is None:
        reason = reason_of(model)
    else:
        last = [reasons[-1] for reasons in known.failures.values() if len(reasons) >= MOST_FAILURES]
        reason = known.reason or (last[-1] if last and not known.graphs else None)
    return None if reason is None else f"tokens are not run as graphs: {reason}"
