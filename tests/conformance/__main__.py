"""Compare PyTorch's own operators, modules and optimizers on foo with the CPU.

The options are those of ``python -m foo_ops.testing.conformance``.
"""

import sys

from known import KNOWN

from foo_ops.testing.conformance.__main__ import parser, run

if __name__ == "__main__":
    sys.exit(not run(parser().parse_args(), KNOWN))
