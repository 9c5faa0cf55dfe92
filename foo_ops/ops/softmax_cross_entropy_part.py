"""foo::softmax_cross_entropy_part_backward, for a part of the classes.

It takes what foo::softmax_cross_entropy_backward takes, the logsumexp of all classes among it. That
one divides probabilities by their sum where the logsumexp is large, which a part does not know. It
has no derivatives: DTensor calls it below autograd.
"""

from __future__ import annotations

import torch

from foo_ops import library
from foo_ops.library.operators import find
from foo_ops.ops.softmax_cross_entropy import backward_flops, fake_backward, make_backward_kernel

NAME = "foo::softmax_cross_entropy_part_backward"
schema = str(find("foo::softmax_cross_entropy_backward")._schema)
library.define(NAME, schema[schema.index("(") :], tags=torch.Tag.pt2_compliant_tag)
library.register_fake(NAME, fake_backward)
library.register_flops(NAME, takes_tensors=True)(backward_flops)
library.register_kernel(NAME, ("cpu", "foo"), make_backward_kernel(is_part=True))
