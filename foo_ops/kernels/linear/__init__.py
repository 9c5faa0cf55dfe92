"""Matrix products of any size for linear layers: output = left right^T + bias.

The forward pass of a linear layer and both products of its backward pass are one kernel; strides
describe how its matrices lie in memory::

                  left            right           output
    forward       input           weight          input weight^T
    backward      grad_output     weight^T        grad_input
                  grad_output^T   input^T         grad_weight

A launcher cuts the output into blocks, which threads compute independently. A block is summed over
sections of the depth. For each section, the block's rows of the left matrix are packed to scratch
memory, then its columns of the right matrix, panel by panel, in the order in which the product
reads them (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication"). L2
holds the packed matrices and the sums; meanwhile the data to pack next is prefetched into it::

                         right: panels of columns, packed step by step
                        +-------+-------+-------+
                        |   |   |       |       |    a section of the depth
                        |   v   |       |       |
                        +-------+-------+-------+
        left   +-----+  +-------+-------+-------+
        rows   |---> |  |       |       |       |    sums of the block, in the compute type,
        ...    |---> |  |       |       |       |    panel by panel
               +-----+  +-------+-------+-------+

Another kernel computes few rows: it reads the right matrix once, as it lies in memory. It also
computes few columns, with rows and columns exchanged. A third one computes products of few steps:
it rounds sums while they are in registers.

A right matrix of 8-bit or 4-bit integers is read as stored for few rows, and converted to numbers
by packing for more rows; the rest of both kernels is the same. If the rows of the left matrix are
rounded to 8 bits, products are of integers (foo_ops/kernels/linear/integer.py).

For a loss, a block of logits exists in scratch memory only: one kernel adds it to the statistics of
its rows, another turns it into a block of gradients (foo_ops/kernels/linear/cross_entropy.py).
"""

# Defines integer division for all kernels.
from foo_ops.kernels import lang  # noqa: F401
