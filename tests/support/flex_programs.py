"""Run texts of programs in the kernels of flex attention, and read the scores they compute.

Each query sees one key, so that its logsumexp is the score that the program made.
"""

import torch

from foo_ops.kernels.flex.program import Gradient, Node, Program

NOT_A_NUMBER, LARGEST = -777.0, 1e30
MASK = """int32 input query
int32 input key
int32 integer {}
int32 remainder 0 2
bool eq 3 1
output 4"""


class Writer:
    """Writes a program node by node; each node is known by its number."""

    def __init__(self):
        self.nodes, self.numbers, self.integers, self.gradients = [], [], [], []

    def add(self, dtype, operation, *operands, name=""):
        self.nodes.append(Node(dtype, operation, operands, name))
        return len(self.nodes) - 1

    def input(self, name, dtype="int32"):
        return self.add(dtype, "input", name=name)

    def number(self, value, dtype):
        self.numbers.append(value)
        return self.add(dtype, "number", len(self.numbers) - 1)

    def integer(self, value, dtype="int32"):
        self.integers.append(value)
        return self.add(dtype, "integer", len(self.integers) - 1)

    def cast(self, node, dtype):
        return self.add(dtype, "cast", node)

    def load(self, dtype, captured, *indices):
        return self.add(dtype, "load", captured, *indices)

    def finite(self, node, dtype):
        """Map any float to a finite number that identifies it."""
        is_number = self.add("bool", "eq", node, node)
        bounds = [self.number(it, dtype) for it in (-LARGEST, LARGEST, NOT_A_NUMBER)]
        above = self.add(dtype, "maximum", node, bounds[0])
        within = self.add(dtype, "minimum", above, bounds[1])
        return self.add(dtype, "where", is_number, within, bounds[2])

    def gradient(self, captured, value, *indices):
        self.gradients.append(Gradient(captured, value, indices))

    def text(self, output):
        return str(Program(tuple(self.nodes), output, tuple(self.gradients)))


def finite(values):
    """Apply `Writer.finite` to a tensor."""
    values = torch.where(values.isnan(), NOT_A_NUMBER, values.double())
    return values.clamp(-LARGEST, LARGEST)


def seen_keys(queries, keys):
    """Return the key that each query sees."""
    return torch.arange(queries) % keys


def call_of(writer, output, sizes, query, key, captured, dtype, device):
    """Return the arguments of a call in which each query sees one key."""
    batch, heads, queries, keys = sizes
    query = query.to(dtype).view(batch, heads, queries, 1).to(device)
    key = key.to(dtype).view(batch, heads, keys, 1).to(device)
    one_block = [torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)]
    # The number of keys is the last of the integers, which other programs do not read.
    options = {
        "score_mod": writer.text(output),
        "mask_mod": MASK.format(len(writer.integers)),
        "numbers": writer.numbers,
        "integers": [*writer.integers, keys],
        "scale": 1.0,
        "query_block": max(1, queries),
        "key_block": max(1, keys),
    }
    lists = [it.to(device) for it in one_block]
    return (query, key, torch.ones_like(key), list(captured), *lists), options


def scores_of(writer, output, sizes, query, key, captured, dtype, device):
    """Return the score that a program computes for each query and the key it sees."""
    inputs, options = call_of(writer, output, sizes, query, key, captured, dtype, device)
    return torch.ops.foo.flex_attention(*inputs, **options)[1].cpu().double()
