"""Matrix products of any size: output = left right^T + bias, as linear layers have them.

The forward pass of a linear layer and both products of its backward pass are one kernel, which is
told by strides how its matrices lie in memory::

                  left            right           output
    forward       input           weight          input weight^T
    backward      grad_output     weight^T        grad_input
                  grad_output^T   input^T         grad_weight

A launcher cuts the output into blocks, which threads compute on their own. A block is summed over
sections of the depth. For each of them its rows of the left matrix are packed to scratch memory,
and then its columns of the right matrix, panel by panel, in the order in which the product reads
them (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication"). The second
cache holds these and the sums, and meanwhile gets what is packed next::

                         right: panels of columns, packed step by step
                        +-------+-------+-------+
                        |   |   |       |       |    a section of the depth
                        |   v   |       |       |
                        +-------+-------+-------+
        left   +-----+  +-------+-------+-------+
        rows   |---> |  |       |       |       |    sums of the block, in the compute type,
        ...    |---> |  |       |       |       |    panel by panel
               +-----+  +-------+-------+-------+

Few rows are another kernel, which reads the right matrix once, as it lies in memory. It serves few
columns as well, with rows and columns exchanged.

A right matrix of integers of 8 or 4 bits is read as it is for few rows, and becomes numbers while
it is packed for more; the rest of both kernels is the same.

Where the output is logits, of which a loss is computed, a block of them is taken into the
statistics of its rows in scratch memory, or becomes a block of their gradients there:
`cross_entropy` and `cross_entropy_gradient`.
"""

# Division of integers, in whatever kernel, is what it defines.
from foo_ops.kernels import lang  # noqa: F401
