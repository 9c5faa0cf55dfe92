"""Run random sequences of calls on device foo and on the CPU, and compare.

Every tensor exists twice, as twins: one on the CPU and one on foo. A step calls one function on
both sides. After each step, everything observable must agree: values bit by bit, sizes, strides,
offsets, version counters, pending conjugations, which tensors share memory, the sizes of their
storages, and errors. Hypothesis chooses the steps and, if the sides differ, looks for the shortest
sequence that shows it.

`tests/device/test_machine.py` runs some hundred steps, `make reliability` a hundred thousand.
"""

import dataclasses
import gc
import itertools
import re
import warnings

import hypothesis
import torch
from hypothesis import stateful, strategies
from support.device_steps import BINARY, DTYPES, IN_PLACE, IN_PLACE_OF_TWO, OUT, UNARY, VIEWS
from torch import Tensor

MOST_TWINS = 8

MOST_ELEMENTS = 200_000


@dataclasses.dataclass(eq=False)
class Twins:
    """The same tensor on both sides."""

    host: Tensor
    foo: Tensor


def tensors_in(result):
    """Return the tensors in a call's result."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return list(itertools.chain.from_iterable(map(tensors_in, result)))
    return []


def words_of(error):
    """Return the text of an error, without the names of devices and addresses."""
    words = re.sub(r"(torch\.|CPU|foo)(\w+)(Type|Tensor)\b", r"\2", f"{error}")
    words = re.sub(r"foo(:\d)?|PrivateUse1", "cpu", words)
    return re.sub(r"0x[0-9a-f]+", "address", words)


def outcome(function, tensors):
    """Return the results of a call, or the error that it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*tensors), None
    except Exception as error:
        return None, error


def bits_of(tensor):
    """Return the values of a tensor on the CPU as integers, so that NaN equals itself."""
    tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return tensor.view(-1).view(torch.uint8)


def facts_of(tensor):
    """Return everything observable about a tensor, except its values and its device."""
    return {
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "strides": tensor.stride(),
        "offset": tensor.storage_offset(),
        "version": tensor._version,
        "conjugation": tensor.is_conj(),
        "negation": tensor.is_neg(),
        "bytes of storage": tensor.untyped_storage().nbytes(),
        "is a leaf": tensor.is_leaf,
        "requires_grad": tensor.requires_grad,
    }


def sharing(tensors):
    """Return, for each tensor, the index of the first tensor with the same storage."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [storages.index(storage) for storage in storages]


def fill_storage(tensor, since=0):
    """Zero a storage's bytes from ``since`` on, which are not initialised yet."""
    storage = tensor.untyped_storage()
    everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    everything[since:].zero_()


positions = strategies.integers(0, MOST_TWINS - 1)

numbers = strategies.integers(0, 5)

shapes = strategies.lists(strategies.integers(0, 5), max_size=4)


def names(table):
    return strategies.sampled_from(list(table))


class DeviceMachine(stateful.RuleBasedStateMachine):
    """Takes random steps; each rule is a kind of step. See the module's docstring."""

    steps = 0

    def __init__(self):
        super().__init__()
        gc.collect()
        self.allocated = torch.foo.memory_allocated()
        self.twins = []
        self.agrees = True

    # ------------------------------------------------------------------------------------- steps

    def call(self, function, *positions):
        """Call a function on both sides, and keep what it returns."""
        self.agrees = False
        chosen = [self.twins[position % len(self.twins)] for position in positions]
        host, host_error = outcome(function, [twins.host for twins in chosen])
        foo, foo_error = outcome(function, [twins.foo for twins in chosen])
        assert type(host_error) is type(foo_error), (host_error, foo_error)
        assert words_of(host_error) == words_of(foo_error), f"{host_error}\nand on foo {foo_error}"
        if host_error is not None:
            # Torch refuses some calls after it has resized their result, on one side alone.
            self.twins = [t for t in self.twins if t.host.shape == t.foo.shape]
            if not self.twins:
                self.add(torch.ones(3))
            return
        host, foo = tensors_in(host), tensors_in(foo)
        assert len(host) == len(foo)
        known = [id(twins.host) for twins in self.twins]
        for each_host, each_foo in zip(host, foo):
            assert each_foo.device.type == "foo"
            if id(each_host) in known:
                assert self.twins[known.index(id(each_host))].foo is each_foo
            elif each_host.numel() <= MOST_ELEMENTS:
                self.twins.append(Twins(each_host, each_foo))
        del self.twins[:-MOST_TWINS]

    def are_too_large(self, *positions):
        """Return whether broadcasting large tensors would need more memory than there is."""
        shapes = {self.twins[position % len(self.twins)].host.shape for position in positions}
        return len(shapes) > 1 and min(shape.numel() for shape in shapes) > 1000

    def cannot_be_resized(self, position):
        """Return whether torch raises an internal error, as on the CPU after _lazy_clone."""
        twins = self.twins[position % len(self.twins)]
        return any(torch._C._is_cow_tensor(tensor) for tensor in (twins.host, twins.foo))

    @stateful.initialize(seed=strategies.integers(0, 100))
    def seed(self, seed):
        torch.manual_seed(seed)
        self.add(torch.randn(3, 4))
        self.add(torch.arange(6))

    def add(self, host):
        self.twins.append(Twins(host, host.to("foo")))
        del self.twins[:-MOST_TWINS]

    @stateful.rule(shape=shapes, dtype=strategies.sampled_from(DTYPES))
    def create(self, shape, dtype):
        is_unsigned = dtype in (torch.uint8, torch.bool)
        self.add(
            (torch.randn(shape) * 4).abs().to(dtype)
            if is_unsigned
            else torch.randn(shape).to(dtype)
        )

    @stateful.rule(count=strategies.sampled_from([1000, 33_000, 140_000]))
    def create_large(self, count):
        """Create a tensor large enough for several threads and for another kind of memory block."""
        self.add(torch.arange(count) % 1000 / 7)

    @stateful.rule(shape=shapes)
    def draw(self, shape):
        """Draw the same random numbers from the same seed on both sides."""
        torch.manual_seed(len(shape))
        host = torch.randn(shape)
        torch.manual_seed(len(shape))
        self.twins.append(Twins(host, torch.randn(shape, device="foo")))
        del self.twins[:-MOST_TWINS]

    @stateful.rule(name=names(UNARY), position=positions)
    def unary(self, name, position):
        self.call(UNARY[name], position)

    @stateful.rule(name=names(BINARY), one=positions, other=positions)
    def binary(self, name, one, other):
        if not self.are_too_large(one, other):
            self.call(BINARY[name], one, other)

    @stateful.rule(name=names(VIEWS), position=positions, number=numbers)
    def view(self, name, position, number):
        self.call(lambda x: VIEWS[name](x, number), position)

    @stateful.rule(name=names(IN_PLACE), position=positions, number=numbers)
    def write(self, name, position, number):
        torch.manual_seed(number)
        self.call(lambda x: IN_PLACE[name](x, number), position)

    @stateful.rule(name=names(IN_PLACE_OF_TWO), one=positions, other=positions)
    def write_from(self, name, one, other):
        self.call(IN_PLACE_OF_TWO[name], one, other)

    @stateful.rule(name=names(OUT), one=positions, out=positions)
    def write_out(self, name, one, out):
        def write(x, out):
            old = out.untyped_storage().nbytes()
            try:
                return OUT[name](x, out)
            except Exception:
                # Some calls are refused only after `out` has been resized.
                fill_storage(out, old)
                raise

        if not self.cannot_be_resized(out):
            self.call(write, one, out)

    @stateful.rule(position=positions, shape=shapes)
    def resize(self, position, shape):
        """Resize, then zero the bytes that a larger storage adds: they are undefined."""

        def resize(tensor):
            old = tensor.untyped_storage().nbytes()
            tensor.resize_(shape)
            fill_storage(tensor, old)
            return tensor

        if not self.cannot_be_resized(position):
            self.call(resize, position)

    @stateful.rule(position=positions, other=positions, name=names(UNARY))
    def free_and_restore_storage(self, position, other, name):
        """Free a storage and restore it, as sharded parameters do between uses."""
        chosen = self.twins[position % len(self.twins)]
        sizes = []

        def free(tensor):
            sizes.append(tensor.untyped_storage().nbytes())
            tensor.untyped_storage().resize_(0)

        def restore(tensor):
            tensor.untyped_storage().resize_(sizes[0])
            fill_storage(tensor)

        if self.cannot_be_resized(position):
            return
        self.call(free, position)
        if self.twins[other % len(self.twins)].host.untyped_storage().nbytes():
            torch.foo.empty_cache()
            self.call(UNARY[name], other)
        if sizes:
            restore(chosen.host)
            restore(chosen.foo)

    @stateful.rule(position=positions)
    def forget(self, position):
        if len(self.twins) > 1:
            del self.twins[position % len(self.twins)]

    @stateful.rule()
    def empty_cache(self):
        torch.foo.empty_cache()

    @stateful.rule(one=positions, other=positions)
    def mix_devices(self, one, other):
        """Mix devices: foo refuses, and nothing changes."""
        one, other = (self.twins[position % len(self.twins)] for position in (one, other))
        if one.host.dim() > 0 and other.host.dim() > 0:
            _, error = outcome(torch.add, [one.foo, other.host])
            assert error is not None
            _, error = outcome(lambda x, y: x.add_(y), [one.foo, other.host])
            assert error is not None

    # ------------------------------------------------------------------------------------ agreed

    @stateful.invariant()
    def agree(self):
        type(self).steps += 1
        hosts = [twins.host for twins in self.twins]
        foos = [twins.foo for twins in self.twins]
        assert sharing(hosts) == sharing(foos)
        for host, foo in zip(hosts, foos):
            assert facts_of(host) == facts_of(foo), f"{facts_of(host)}\nand on foo {facts_of(foo)}"
            assert torch.equal(bits_of(host), bits_of(foo)), f"{host}\nand on foo {foo}"
        self.agrees = True

    def teardown(self):
        """Check that all memory comes back."""
        self.twins.clear()
        gc.collect()
        assert not self.agrees or torch.foo.memory_allocated() == self.allocated


def settings(examples, steps, **others):
    return hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        **others,
    )
